"""Quirks of the loops of DSB (arXiv 2602.05992) and DCD (arXiv 2601.02076), whose windows slide."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.sliding import SlidingCache
from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.score import Score, rate, score_needs
from dllm_sampler.stops.end_tokens import with_finish
from dllm_sampler.stops.fill import FillStop


@dataclass(frozen=True)
class FirstFromRefresh(AroundWithState):
    """A scheduler that commits exactly the window's first position in a forward that refreshes the cache.

    Source: DSB's cached Dream loop.

    Args:
        inner: the scheduler of every other step.
        every: commits from one refresh to the next, equal to the cache's `every`.
    """

    every: int = 32

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner carry, and `[B]` the number of masks at the last refresh, 0 before the first."""
        return super().init(canvas), torch.zeros_like(canvas.start)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = self.inner.tell(canvas, query, readout, carry[0])
        left = canvas.masked.sum(1)
        due = (canvas.step == 0) | (carry[1] - left >= self.every)
        first = canvas.eligible(query.positions) & (query.positions == canvas.start[:, None])
        commit = torch.where(due[:, None], first, edit.commit)
        return replace(edit, commit=commit), (inner, torch.where(due, left, carry[1]))


@dataclass(frozen=True)
class StepQuota(Scheduler):
    """A scheduler that commits a fixed number of the most confident masks of the window in each forward.

    Source: DCD's `fixed` and `entropy_fixed`, and DSB without a threshold.

    Args:
        count: positions per forward.
        extra: number of forwards at the beginning that commit one position more.
        score: measure by which positions are ranked.
    """

    count: int
    extra: int = 0
    score: Score = "confidence"

    @property
    @override
    def needs(self) -> frozenset[str]:
        return score_needs(self.score)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        count = self.count + (canvas.step < self.extra).long()
        commit = top(rate(self.score, canvas, query, readout), canvas.eligible(query.positions), count)
        return Edit(readout.token[:, 0], commit), carry


@dataclass
class WithoutLookahead(SlidingCache):
    """A sliding cache that does not compute the window's last column, whose output a logit shift does not use.

    Source: DCD's wrapper of Dream with `lookahead=0`.
    """

    @override
    def end(self, canvas: Canvas) -> Tensor:
        return super().end(canvas) - 1


@dataclass(frozen=True)
class FillAtBlock(FillStop):
    """`FillStop` that fills and ends a row only when a block is over.

    Source: DCD's baseline with fixed blocks.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        over = after.block_over(edit) & self.ends(after).any(1)  # [B]
        return with_finish(replace(super().__call__(canvas, after, query, readout, edit), finish=edit.finish), over)

    @override
    def may_fill(self, after: Canvas, edit: Edit) -> Tensor:
        return after.block_over(edit)
