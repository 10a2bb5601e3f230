"""WINO's limit on remasked tokens and its record of open positions, as in its published code."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.spec import CommittedMasks, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.wino import Wino

FIRST = 30  # the published loop's number of commits "before" a block's first step


@dataclass(frozen=True)
class PublishedWino(Wino):
    """WINO that remasks at most one token less than the *previous* step committed, so a step may lose tokens.

    Source: WINO, arXiv 2507.18578. A step with a single commit remasks nothing. A mask token that the model predicts
    (`compat=True`) counts as committed in its block, and a shadow judges it like any other token. When the next block
    opens, such positions of earlier blocks become open again.
    """

    mask_id: int | None = field(init=False, default=None)

    @property
    def traits(self) -> Traits:
        """Traits of WINO. Mask tokens in the answer may be final."""
        return super().traits.adding(CommittedMasks())

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(self, mask_id=context.spec.mask_id)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` commits of the previous step, and `[B, L+1] bool` open positions of earlier blocks."""
        return torch.zeros_like(canvas.start), torch.zeros_like(canvas.masked)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Query the block and the open positions of earlier blocks."""
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
        """Return four steps per token. The published rule itself has no bound."""
        return 4 * tokens
