"""D2F: commit sure positions in all blocks that are open."""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_number
from dllm_sampler.core.protocols import Blocks, Carry, Context, Scheduler
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.score import rate, score_needs

Sureness = Literal["entropy", "margin", "confidence"]


@dataclass(frozen=True)
class D2F(Scheduler):
    """D2F's threshold, for several open blocks: a block that must advance commits at least one mask.

        while masks remain in the open blocks:
            token, confidence, score = model(canvas)
            commit the masks of all open blocks with confidence > threshold
            in each block that must advance and has no such mask:
                commit the mask with the highest score

    Source: D2F, arXiv 2508.09192, as in the code of LoPA, arXiv 2512.16229. It is made for `blocks=pipeline`, which
    decides which blocks must advance. With other blocks the active block must advance.

    Args:
        threshold: probability that a mask must exceed. 1 commits one position per block and step.
        score: statistic of the best mask: the lowest entropy, the largest margin or the highest confidence.
    """

    threshold: float = 0.9
    score: Sureness = "entropy"
    blocks: Blocks | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("scheduler.threshold", self.threshold, "a probability")
        check_choice("scheduler.score", self.score, Sureness)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return score_needs(self.score)

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the blocks."""
        return with_bound_fields(self, blocks=context.blocks)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        score, chosen = rate(self.score, canvas, query, readout), eligible & (sure > self.threshold)
        if self.blocks is None or not self.blocks.several:
            best = at_least_one(torch.zeros_like(chosen), score, eligible)
            chosen = torch.where(chosen.any(1, keepdim=True), chosen, best)
        return Edit(readout.token[:, 0], chosen, score=score), carry
