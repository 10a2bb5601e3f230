"""Orders of decoding that are fixed beforehand: what the exact values are stated for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.score import Score, rate, score_needs


@dataclass(frozen=True)
class GivenSizes(Scheduler):
    """This many positions per step, the best by a score; more steps than sizes repeat the last size.

    `fixed` divides a block evenly and gives the remainder to its first steps; here the sizes are free.
    """

    sizes: tuple[int, ...]
    score: Score = "random"

    @property
    def needs(self) -> frozenset[str]:
        """The score's statistic."""
        return score_needs(self.score)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        sizes = torch.tensor(self.sizes, device=canvas.ids.device)
        count = sizes[canvas.age.clamp(max=len(self.sizes) - 1)]
        score = rate(self.score, canvas, query, readout)
        return Edit(readout.token[:, 0], top(score, canvas.eligible(query.positions), count)), carry


@dataclass(frozen=True)
class GivenParts(Scheduler):
    """Positions of the generation, counted from 0, that each step commits."""

    parts: tuple[tuple[int, ...], ...]

    def init(self, canvas: Canvas) -> Carry:
        """`[B, L+1]` the step of each column."""
        turn = torch.zeros_like(canvas.ids)
        for step, part in enumerate(self.parts):
            turn.scatter_(1, canvas.first[:, None] + torch.tensor(part, device=turn.device), step)
        return turn

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Tensor) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        due = carry.gather(1, query.positions) <= canvas.step[:, None]
        return Edit(readout.token[:, 0], due & canvas.eligible(query.positions)), carry
