"""Blocks of one length. Several may be open at once."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number, check_positive
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Context
from dllm_sampler.core.select import arange, rank
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class MultiBlock(Blocks):
    """Blocks that are decoded side by side: the next one opens once a share of the last open one is committed.

    Source: entropy-based multi-block decoding of d3LLM, arXiv 2601.07568 (`scheduler=entropy`). Any rule that judges
    positions one by one also works, for example a threshold. The active block runs from the first block with masks to
    the end of the last open block. At most one block opens in a forward, by the shares committed before. Each forward
    commits at least one position of the first block with masks. If the scheduler chose none, it is the best one.

    d3LLM's `decoded_token_threshold` is not an argument. It only selects the first block with masks, whatever its
    value.

    Args:
        length: positions per block, counted from the answer's first one. The last block may be shorter.
        add_threshold: share of the last open block that must be committed before the next one opens, above 0. 1 opens
            one block at a time. The published evaluation has 0.1, its function's default is 0.5.
        full_threshold: committed share of a block from which on each forward must commit a position of the next block
            too, as in D2F, arXiv 2508.09192. By default only the first block with masks must commit one.

    Raises:
        UserError: in `bind`, for models that do not see masks after the block.
    """

    several: ClassVar[bool] = True
    judges_draws: ClassVar[bool] = True  # `progress` ranks by confidence if the scheduler ranks nothing

    length: int = 32
    add_threshold: float = 0.1
    full_threshold: float | None = None

    def __post_init__(self) -> None:
        check_count("blocks.length", self.length)
        check_positive("blocks.add_threshold", self.add_threshold, "a share", most=1)
        check_number("blocks.full_threshold", self.full_threshold, "a share", most=1, optional=True)

    @override
    def bind(self, context: Context) -> Self:
        check_sees_masks_after(self, context)
        return self

    @override
    def lookahead(self, tokens: int) -> int:
        return min(self.length, tokens)

    @override
    def widest(self, tokens: int) -> int:
        return tokens

    @override
    def move(self, after: Canvas) -> tuple[Tensor, Tensor]:
        first = self.begins(after, after.frontier())  # of the first block with masks
        start = torch.where(after.masked.any(1), after.next_free(first), after.end)
        wanted = after.stop + self.length * self.adds(after)
        stop = torch.minimum(torch.maximum(wanted, first + self.length), after.end)
        return torch.where(after.done, after.start, start), torch.where(after.done, after.stop, stop)

    def adds(self, after: Canvas) -> Tensor:
        """Return `[B] bool` rows that open one more block."""
        column = after.columns()
        last = (column >= self.begins(after, after.stop - 1)[:, None]) & (column < after.stop[:, None])
        left, size = (last & after.masked).sum(1), (last & ~after.layout.frozen).sum(1)
        return (after.stop > after.layout.first) & (_share(left, size) >= self.add_threshold)

    def full(self, canvas: Canvas) -> Tensor:
        """Return `[B, N] bool` blocks that must commit a position, of the N that an answer can have."""
        number, count = self.number(canvas, canvas.columns()), -(-canvas.layout.longest // self.length)
        if self.full_threshold is None:
            return arange(count, number.device) == self.number(canvas, canvas.frontier()[:, None])
        free = ~canvas.layout.frozen & (canvas.columns() < canvas.end[:, None])
        zero = canvas.ids.new_zeros(len(canvas.ids), count)
        left, size = (zero.scatter_add(1, number, among.long()) for among in (canvas.masked, free))
        before = torch.ones_like(left[:, :1], dtype=torch.float64)  # the prompt
        return torch.cat([before, _share(left, size)[:, :-1]], 1) >= self.full_threshold

    def number(self, canvas: Canvas, columns: Tensor) -> Tensor:
        """Return `[B, Q]` the number of each column's block, from 0. Columns outside the answer get the nearest."""
        last = (canvas.layout.longest - 1) // self.length
        return ((columns - canvas.layout.first[:, None]) // self.length).clamp(0, last)

    def begins(self, canvas: Canvas, column: Tensor) -> Tensor:
        """Return `[B]` the first column of the block that contains `column [B]`."""
        return column - (column - canvas.layout.first) % self.length

    @override
    def progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        number, eligible = self.number(canvas, query.positions), canvas.eligible(query.positions)  # [B, Q]
        full = self.full(canvas)  # [B, N]
        chosen = torch.zeros_like(full, dtype=torch.long).scatter_add(1, number, (edit.commit & eligible).long())
        late = eligible & (full & (chosen == 0)).gather(1, number)
        place = rank(readout.confidence[:, 0] if edit.score is None else edit.score, late)  # the others come last
        best = torch.full_like(chosen, place.shape[1]).scatter_reduce(1, number, place, "amin")
        added = late & (place == best.gather(1, number))
        return replace(edit, commit=edit.commit | added)


def check_sees_masks_after(blocks: Blocks, context: Context) -> None:
    """Refuse a model that does not see the masks after its block."""
    if context.spec.attention != "bidirectional" or context.spec.encoder:
        raise UserError(
            "blocks-incompatible",
            f"blocks={named(blocks)} is for models that see the whole canvas, and this one does not. Use blocks=fixed.",
        )


def _share(left: Tensor, size: Tensor) -> Tensor:
    """Return the committed share of blocks of `size` positions with `left` masks. It is 1 for empty blocks."""
    return 1 - left.double() / size.clamp(min=1)
