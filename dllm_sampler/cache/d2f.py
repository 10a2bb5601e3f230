"""D2F's cache: each block is stored once, by the first forward after it was filled."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.checks import check_choice
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Cache, Context, Plan
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.core.visibility import Visible
from dllm_sampler.errors import UserError

Attention = Literal["full", "block_causal"]


@dataclass
class D2FCache(BaseCache):
    """D2F's cache: each block is stored once, by the first forward that sees it full.

        computes   all columns from the first block that is not stored
        reuses     the prompt and the stored blocks
        refreshes  nothing

    Source: D2F, arXiv 2508.09192, as in the code of LoPA, arXiv 2512.16229. Keys and values of the prompt come from the
    first forward. Stored keys and values never change. If a forward computes several candidates, those of the candidate
    from which the step continues are stored. On models with a logit shift (Dream) the forward also stores the row that
    predicts the next position. If it did not query that position (for example under `random_order`), the row is
    computed again.

    Args:
        attention: columns that a token sees. `full`: all that are stored or computed, so stored values depend on the
            tokens after them at that time. `block_causal`, which D2F trains: the prompt, earlier blocks and its own
            block. Stored values then do not depend on later tokens, so answers are those of forwards that compute
            everything under this attention.
    """

    keeps_noise: ClassVar[bool] = False
    steady: ClassVar[bool] = True

    attention: Attention = "full"

    length: int = field(init=False, default=0, repr=False, compare=False)  # of a block
    stored: Tensor = field(init=False, repr=False, compare=False)  # [B] columns before this one are stored
    # [B, D] hidden states of the column before `stored`
    rows: Tensor | None = field(init=False, default=None, repr=False, compare=False)
    kept: Tensor = field(init=False, repr=False, compare=False)  # [B] bool: the last forward has filled in `rows`
    made: tuple[Plan, Tensor] | None = field(init=False, default=None, repr=False, compare=False)  # of the last forward

    def __post_init__(self) -> None:
        check_choice("cache.attention", self.attention, Attention)

    @override
    def bind(self, context: Context) -> Cache:
        blocks = context.blocks
        if self.attention == "block_causal" and (blocks.sizes_on_open or blocks.slides):
            raise UserError(
                "cache-incompatible",
                f"cache.attention=block_causal needs blocks of one length, and blocks={named(blocks)} varies it."
                " Use blocks=pipeline, blocks=fixed or cache.attention=full.",
            )
        bound = replace(self)
        bound.length = blocks.lookahead(2**16)
        return super(D2FCache, bound).bind(context)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.stored, self.kept = torch.zeros_like(canvas.start), torch.zeros_like(canvas.done)

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        first = self.stored
        if self.spec.shift:
            first = first - (canvas.masked.gather(1, first[:, None])[:, 0] & ~self.kept).long()
        return canvas.columns() >= first[:, None]

    @override
    def sees(self, canvas: Canvas, query: Query) -> Visible:
        found = super().sees(canvas, query)
        return (
            found if self.attention == "full" else found.in_blocks(canvas.columns(), self.length, canvas.layout.first)
        )

    @override
    def recalled(self, canvas: Canvas) -> Tensor | None:
        if not self.spec.shift:
            return None
        return (canvas.columns() == self.stored[:, None]) & self.kept[:, None]

    @override
    def restore(self, hidden: Tensor, plan: Plan) -> Tensor:
        row = plan.head_rows.row
        if self.spec.shift and self.rows is not None:
            here = (plan.head_rows.position == self.stored[row]) & self.kept[row]  # [R]
            hidden = torch.where(here[:, None], self.rows[row], hidden)
        self.made = plan, hidden
        return hidden

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        assert self.made is not None
        (plan, hidden), self.made = self.made, None
        won = torch.zeros_like(canvas.start) if edit.candidate is None else edit.candidate  # [B]
        if self.spec.shift:
            head_rows, rows = plan.head_rows, len(won)
            here = (head_rows.position == canvas.start[head_rows.row]) & (head_rows.candidate == won[head_rows.row])
            here = here & (head_rows.place < head_rows.query.ids.numel())  # fillers have the last entry's place
            old = hidden.new_zeros(rows, hidden.shape[1]) if self.rows is None else self.rows
            room, at = torch.cat([old, old[:1]]), torch.where(here, head_rows.row, rows)  # [R]
            self.rows = room.index_copy(0, at, hidden)[:rows]
            kept = room.new_zeros(rows + 1, dtype=torch.bool).index_fill(0, at, True)[:rows]
            self.kept = kept & (canvas.start > 0)
        self.stored = torch.where(canvas.done, self.stored, canvas.start)
