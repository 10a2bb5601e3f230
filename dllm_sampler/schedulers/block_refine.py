"""Block refinement: a rising quota of committed tokens, while the rest of the block stays noise."""

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import Traits, UniformNoise
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class BlockRefine(Scheduler):
    """Block refinement: a rising quota of committed tokens, while the rest of the block stays noise.

        for t = 1 ... steps while noise remains in the block:
            token, confidence = model(canvas)
            n = ceil(t * length of the block / steps) - number of committed tokens
            commit the n surest positions, and all with confidence > threshold
            draw all other positions again, where noise is random tokens

    Source: the block-refinement sampler for DiffusionGemma. Committed tokens are not edited.

    Args:
        steps: upper bound on the forwards per block. A forward may commit nothing if the block is ahead of its quota.
        threshold: a position above this probability is committed beyond the quota too. From 1 on only the quota counts.
    """

    steps: int = 32
    threshold: float = 0.95

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps)
        check_number("scheduler.threshold", self.threshold)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(asks="window", scheduled=True, rare=(UniformNoise(),))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        size, left = canvas.free_in_block(), canvas.noise_left()  # [B]
        due = ((canvas.age + 1) * size + self.steps - 1) // self.steps - (size - left)
        return Edit(readout.token[:, 0], top(sure, eligible, due) | (eligible & (sure > self.threshold))), carry

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps: `steps` for each token, as in blocks of one token."""
        return tokens * self.steps
