"""WINO's bound on what a step takes back, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.wino import Wino

FIRST = 30  # what the published loop takes for the commits before its first step


@dataclass(frozen=True)
class PublishedWino(Wino):
    """The bound is one less than the *previous* step's commits, so that a step may lose tokens.

    Source: WINO, arXiv 2507.18578. A step with a single commit takes nothing back.
    """

    def init(self, canvas: Canvas) -> Carry:
        """`[B]` positions committed in the previous step."""
        return torch.zeros_like(canvas.start)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        edit, _ = super().tell(canvas, query, readout, carry)
        return edit, edit.commit.sum(1)

    def most_back(self, canvas: Canvas, accepted: Tensor, carry: Carry) -> Tensor:
        """See `Wino.most_back`."""
        return carry.masked_fill(canvas.age == 0, FIRST).where(accepted > 1, 1) - 1

    def bound(self, tokens: int) -> int:
        """See `Scheduler.bound`. Nothing says that it ends."""
        return 4 * tokens
