"""WINO's bound on what a step takes back, and its record of open positions, as its code has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.spec import CommittedMasks, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.wino import Wino

FIRST = 30  # what the published loop takes for the commits before its first step


@dataclass(frozen=True)
class PublishedWino(Wino):
    """The bound is one less than the *previous* step's commits, so that a step may lose tokens.

    Source: WINO, arXiv 2507.18578. A step with a single commit takes nothing back. The loop has a record of its own of
    the positions that are open: a mask token written under `compat` is decided, and shadows judge it like any other
    token. Each block has a new record, so masks written in earlier blocks are open again then.
    """

    mask_id: int | None = field(init=False, default=None)

    @property
    def traits(self) -> Traits:
        """Traits of WINO whose mask tokens may be final."""
        return super().traits.adding(CommittedMasks())

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(self, mask_id=context.spec.mask_id)

    def init(self, canvas: Canvas) -> Carry:
        """`[B]` positions committed in the previous step; `[B, L+1] bool` masks of earlier blocks that are open."""
        return torch.zeros_like(canvas.start), torch.zeros_like(canvas.masked)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Ask about the block, and about the masks of earlier blocks that are open."""
        return super().ask(canvas, carry).join(canvas, self.reopened(canvas, carry), canvas.layout.longest)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, _ = super().tell(canvas, query, readout, carry)
        reopened, at = self.reopened(canvas, carry), query.positions
        left = reopened.scatter(1, at, reopened.gather(1, at) & ~edit.commit)
        return replace(edit, keep_block=left.any(1)), (edit.commit.sum(1), left)

    def reopened(self, canvas: Canvas, carry: Carry) -> Tensor:
        """Return `[B, L+1] bool`, the mask tokens written in earlier blocks that this block may still replace."""
        written = (canvas.ids == self.mask_id) & ~canvas.masked & ~canvas.layout.frozen
        return torch.where((canvas.age == 0)[:, None], written & (canvas.columns() < canvas.start[:, None]), carry[1])

    @override
    def eligible(self, canvas: Canvas, query: Query, carry: Carry) -> Tensor:
        at = query.positions
        return canvas.eligible(at) | self.reopened(canvas, carry).gather(1, at)

    @override
    def most_back(self, canvas: Canvas, accepted: Tensor, carry: Carry) -> Tensor:
        return carry[0].masked_fill(canvas.age == 0, FIRST).where(accepted > 1, 1) - 1

    def bound(self, tokens: int) -> int:
        """See `Scheduler.bound`. Nothing says that it ends."""
        return 4 * tokens
