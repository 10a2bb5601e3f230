"""Fast-dLLM's threshold for Dream without a cache: a confidence threshold inside a budget of steps."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import rank
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import SharedSteps, block_steps
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class BudgetedThreshold(SharedSteps, Threshold):
    """Threshold decoding under a budget: an even share of positions per step, and what earlier steps left over.

        quota = ceil(masks of the block / its part of steps);  carry = 0
        while masks remain in the block:
            token, confidence = model(canvas)
            seen = the quota + carry surest masks
            commit those of seen with confidence >= threshold, or else the surest
            carry = number of seen that were not committed
            if the planned steps are over and carry > 0:
                quota = 0

    Source: Fast-dLLM's Dream path without a cache, arXiv 2505.22618. Masks that a cache does not predict join the
    carry. After the planned steps the carry alone drives further ones, so the number of forwards can exceed `steps`.
    The published code asks for an even division. Here the quota is rounded up.

    Args:
        threshold: probability. Above 1 it commits one position per step.
        steps: planned forwards for the whole generation. By default one per position, which means one commit per step.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.steps", self.steps, optional=True)

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, scheduled=True)

    def init(self, canvas: Canvas) -> Carry:
        """Return `quota`, `carry` and the planned steps, each `[B]` and zero. `tell` plans a block when it opens."""
        zero = torch.zeros_like(canvas.start)
        return zero, zero, zero

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible, opens = readout.confidence[:, 0], canvas.eligible(query.positions), canvas.age == 0
        left = canvas.noise_left()  # [B] on the canvas: a cache may choose which masks are queried
        planned = left.clamp(min=1) if self.steps is None else block_steps(canvas, self.steps)
        quota = torch.where(opens, (left + planned - 1) // planned, carry[0])
        steps = torch.where(opens, planned, carry[2])

        place = rank(self.order(canvas, query, sure), eligible)  # [B, Q]
        considered = torch.minimum((quota + carry[1]).clamp(min=1), left)  # [B], a full block carries nothing on
        commit = eligible & (place < considered[:, None]) & ((sure >= self.threshold) | (place == 0))
        rejected = considered - commit.sum(1)  # and what was not queried
        over = (canvas.age + 1 >= steps) & (rejected > 0)
        return Edit(readout.token[:, 0], commit), (quota.masked_fill(over, 0), rejected, steps)
