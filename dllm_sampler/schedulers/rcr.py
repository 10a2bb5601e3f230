"""RCR: every forward judges anew which tokens of the block to keep."""

from dataclasses import dataclass, replace

import torch

from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.protocols import Carry, Traits
from dllm_sampler.schedulers.budget import block_steps
from dllm_sampler.schedulers.remasking import Remasking
from dllm_sampler.select import top


@dataclass(frozen=True)
class RunningConfidence(Remasking):
    """Predict all masks of the block, keep a growing number of its tokens by the confidence each was predicted with.

    Source: RCR (running-confidence remasking), arXiv 2508.13148, as in ParallelBench, arXiv 2510.04767. Step i of T
    leaves ceil(m (i + 1) / T) of the block's m positions committed, whichever forward predicted them: a token
    committed early is taken back when enough later ones are surer.

    Args:
        steps: forwards for the whole generation, of which a block takes one per position at most; None: that many.
        compat: as published, confidences outlive their block: tokens of earlier blocks are taken back and predicted
            again too; every step is made, with or without something to do; and rounding errors count: where
            1 - (i + 1) / T falls just short of a position, one more stays. Needs `cache=none`.
    """

    steps: int | None = None
    compat: bool = False

    @property
    def traits(self) -> Traits:
        """Under `compat` earlier blocks are written again."""
        return replace(super().traits, whole=self.compat)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The block; under `compat` everything up to its end."""
        if not self.compat:
            return super().ask(canvas, carry)
        columns = canvas.columns()[:, canvas.origin : -1].expand(len(canvas.ids), -1)
        return Query.at(canvas, torch.where(columns < canvas.stop[:, None], columns, canvas.length))

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        at = query.positions
        first = canvas.origin if self.compat else canvas.start[:, None]
        reach = (at >= first) & (at < canvas.stop[:, None])  # [B, Q]
        noise = reach & canvas.masked.gather(1, at)
        sure = torch.where(noise, readout.confidence[:, 0], carry.gather(1, at))
        length, steps = self.block(canvas)
        missing = length * (steps - canvas.age - 1) // steps  # [B] what it leaves as noise
        hold = missing > 0
        if self.compat:
            steps = block_steps(canvas, self.steps)
            missing = (length * (1 - (canvas.age + 1).double() / steps)).long().clamp(min=0)
            hold = canvas.age + 1 < steps
        drop = top(-sure, reach & (sure < torch.inf), missing)
        still = drop & noise
        back = drop ^ still
        ids = readout.token[:, 0].masked_fill(back, self.mask)
        return Edit(ids, noise ^ still, back, hold=hold), carry.scatter(1, at, sure)

    def bound(self, tokens: int) -> int:
        """Under `compat` every step is made."""
        return max(tokens, self.steps or 0) if self.compat else super().bound(tokens)
