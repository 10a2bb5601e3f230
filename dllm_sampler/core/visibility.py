"""Which columns a position sees (in a few numbers, as a set, as a mask of attention), and which row predicts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dllm_sampler.core.spec import Attention
from dllm_sampler.core.values import Canvas, Query


@dataclass(frozen=True)
class Visible:
    """Which keys a forward may see, in a few numbers instead of a mask."""

    end: Tensor  # [B] columns from here on are hidden
    grid: int | None  # block-causal: the length of a block in columns; None: each position sees all
    block: tuple[Tensor, Tensor] | None = None  # [B] each: where the active block begins and ends, in a causal context
    causal: tuple[Tensor, Tensor] | None = None  # [B] each: columns from the first to the second see none behind them
    origin: Tensor | None = None  # [B] the grid's first line: what is before it is one block; None: column 0

    @staticmethod
    def of(canvas: Canvas, query: Query, attention: Attention) -> Visible:
        """What `visible` and the blocks of the canvas say."""
        end = canvas.end if query.limit is None else torch.minimum(canvas.end, query.limit)
        block, causal = (canvas.start, canvas.stop) if attention == "causal_context" else None, None
        if query.causal is not None:
            first = canvas.grid_start()
            causal = first, torch.where(query.causal, canvas.grid_end(), first)
        return Visible(end, canvas.grid, block, causal, canvas.origin if canvas.grid else None)

    @property
    def all(self) -> bool:
        """Whether every column sees all that is not hidden."""
        return self.grid is None and self.block is None and self.causal is None

    def until(self, column: Tensor, row: int | None = None) -> Tensor | None:
        """First column that each of `column [B, M]`, or of `column [M]` of one row, does not see; None: only `end`."""
        if self.all:
            return None

        def of(number: Tensor) -> Tensor:
            return number[:, None] if row is None else number[row]

        until = of(self.end)
        if self.grid is not None:
            origin = 0 if self.origin is None else of(self.origin)
            until = ((column - origin) // self.grid + 1).clamp(min=0) * self.grid + origin
        if self.block is not None:
            start, stop = map(of, self.block)
            until = torch.where((column >= start) & (column < stop), stop, column + 1)
        if self.causal is None:
            return until
        first, last = map(of, self.causal)
        return torch.where((column >= first) & (column < last), column + 1, until)


def visible(canvas: Canvas, query: Query) -> Tensor:
    """`[B, L+1] bool` columns that exist for the row and that the query does not hide."""
    seen = canvas.seen() if query.hidden is None else canvas.seen() & ~query.hidden
    return seen if query.limit is None else seen & (canvas.columns() < query.limit[:, None])


def block_causal(queries: Tensor, keys: Tensor, length: int) -> Tensor:
    """`[N, M, S] bool` which keys a row sees under block-causal attention: those of its own block and of earlier ones.

    queries, keys: int64 `[N, M]` and `[N, S]`, positions counted from the row's first token; blocks of `length` too
    """
    own = queries.div(length, rounding_mode="floor")
    return keys.div(length, rounding_mode="floor")[:, None] <= own[..., None]


def clean_and_noisy(block: Tensor, clean: Tensor, noisy: Tensor, *, causal: bool = False) -> Tensor:
    """`[N, 2L, 2L] bool` what a row sees that is a clean copy of a text and, behind it, a noisy one (arXiv 2503.09573).

    The clean copy sees the clean blocks up to its own; a noisy block sees the clean ones before it, and itself. So one
    forward predicts every block as a block-causal model does when the blocks before it are decoded.

    Args:
        block: `[N, L]` the block of each column.
        clean, noisy: `[N, L] bool` columns that exist in each copy.
        causal: a token of the clean copy sees those before it and itself, and none behind it in its block.
    """
    own, other = block[:, :, None], block[:, None]
    column = torch.arange(block.shape[1], device=block.device)
    before = column[None] <= column[:, None] if causal else other <= own
    above = torch.cat([clean[:, None] & before, torch.zeros_like(own == other)], 2)
    below = torch.cat([clean[:, None] & (other < own), noisy[:, None] & (other == own)], 2)
    return torch.cat([above, below], 1)


def keys_of(canvas: Canvas, query: Query, seen: Tensor, positions: Tensor) -> Tensor | None:
    """What the rows at `positions [B, M]` see of the columns `seen [B, L+1]`, as `PaddedPlan.keys` has it."""
    if canvas.grid is not None:
        until = Visible(canvas.end, canvas.grid, origin=canvas.origin).until(positions)
        assert until is not None
        return seen[:, None] & (canvas.columns()[:, None] < until[..., None])
    whole = not canvas.padded and query.limit is None and query.hidden is None
    return None if whole else seen


def mask_of(keys: Tensor | None) -> Tensor | None:
    """Keys seen, `[N, S]` or `[N, M, S]`, as attention wants them."""
    if keys is None:
        return None
    return keys[:, None] if keys.dim() == 3 else keys[:, None, None]


class Predicts(Protocol):
    """A `ModelSpec` or a model, which says which row predicts a token."""

    @property
    def shift(self) -> bool:
        """Raw row i predicts token i + 1."""
        ...

    @property
    def seeds(self) -> bool:
        """The row before the active block predicts the block's first token."""
        ...


def predictors(canvas: Canvas, columns: Tensor, spec: Predicts, before: Tensor | None = None) -> Tensor:
    """`[B, Q]` the column whose hidden state predicts each of `columns [B, Q]`.

    Args:
        before: `[B] bool` rows whose columns are predicted by the one before each (`Query.shifted`). None for no rows.
    """
    # The row's very first position has none before it and reads its own; the empty slot stays what it is.
    if spec.shift:
        return torch.where((columns > 0) & (columns < canvas.length), columns - 1, columns)
    if spec.seeds:
        shifted = columns == canvas.start[:, None]
        if before is not None:
            shifted = shifted | (before[:, None] & (columns < canvas.length))
        return torch.where((columns > 0) & shifted, columns - 1, columns)
    return columns
