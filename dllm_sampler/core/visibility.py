"""The columns that each entry of a forward sees, and the column that predicts a position.

An entry of a forward is a position of one row, and of one segment of that row: a candidate, the canvas, or a shadow.
An entry at column c sees a key at column j of its own row if all of these hold:

- Column j exists for the row, and the query does not hide it (`visible`).
- j is below `Visible.until` of c: it follows from the model's attention, the grid of blocks and the query.
- The key is stored and not replaced by fresh ones (`stored_seen`), or a fresh one of a segment that the entry sees
  (`fresh_seen`).

Networks, caches, references in torch and Triton kernels use these numbers and no other rule. Training has whole rows
in place of entries: `block_causal` and `clean_and_noisy`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.spec import Attention
from dllm_sampler.core.values import Canvas, Query


@dataclass(frozen=True)
class Visible:
    """The columns that each column of a canvas sees: all before a bound."""

    end: Tensor  # [B] columns from here on are hidden
    until: Tensor | None = None  # [B, L+1] first column that each one does not see. None if it is `end` for all

    @staticmethod
    def of(canvas: Canvas, query: Query, attention: Attention) -> Visible:
        """Return the columns that the model's attention, the blocks of the canvas and the query leave visible."""
        column = canvas.columns()
        found = Visible(canvas.end if query.limit is None else torch.minimum(canvas.end, query.limit))
        if attention == "causal_context":
            found = found.bounded(torch.where(canvas.in_block(), canvas.stop[:, None], column + 1))
        elif canvas.layout.grid is not None:
            found = found.in_blocks(column, canvas.layout.grid.length, canvas.layout.grid_origin)
        if query.causal is not None:
            first = canvas.grid_start()
            found = found.causal(column, first, torch.where(query.causal, canvas.grid_end(), first))
        return found

    def bounded(self, until: Tensor) -> Visible:
        """Return a copy in which each column also sees nothing from `until [1|B, L+1]` on."""
        return replace(self, until=torch.minimum(until, self.end[:, None] if self.until is None else self.until))

    def in_blocks(self, column: Tensor, length: int, origin: Tensor | None) -> Visible:
        """Return a copy in which each `column [1, L+1]` sees its block and earlier ones only (`block_end`)."""
        return self.bounded(block_end(column, length, None if origin is None else origin[:, None]))

    def causal(self, column: Tensor, first: Tensor, stop: Tensor) -> Visible:
        """Return a copy in which each `column [1, L+1]` from `first [B]` to `stop [B]` sees nothing after itself."""
        inside = (column >= first[:, None]) & (column < stop[:, None])
        return self.bounded(torch.where(inside, column + 1, column.shape[1]))

    def at(self, row: Tensor, column: Tensor) -> Tensor | None:
        """Return `[T]` the bounds of the entries at `row [T]` and `column [T]`. None if each is its row's `end`."""
        return None if self.until is None else self.until.flatten()[row * self.until.shape[1] + column]

    def keys(self, canvas: Canvas, query: Query, positions: Tensor) -> Tensor | None:
        """Return the keys that `positions [B, M]` see, in the form of `PaddedPlan.keys`."""
        seen = visible(canvas, query)
        if self.until is not None:
            return seen[:, None] & (canvas.columns() < self.until.gather(1, positions)[..., None])
        whole = not canvas.layout.padded and query.limit is None and query.hidden is None
        return None if whole else seen


def visible(canvas: Canvas, query: Query) -> Tensor:
    """Return `[B, L+1] bool` columns that exist for the row and that the query does not hide."""
    seen = canvas.seen() if query.hidden is None else canvas.seen() & ~query.hidden
    return seen if query.limit is None else seen & (canvas.columns() < query.limit[:, None])


def stored_seen(until: Tensor, columns: int, unread: Tensor | None) -> Tensor:
    """Return `[N, M, S] bool` the stored columns that each entry sees, with S = `columns`.

    until: `[N, M]` first column that each entry does not see
    unread: `[N, S] bool` stored columns that no entry sees: they are hidden, or fresh keys replace them
    """
    seen = select.arange(columns, until.device) < until[..., None]
    return seen if unread is None else seen & ~unread[:, None]


def fresh_seen(until: Tensor, column: Tensor, segment: Tensor | None, unseen: Tensor | None) -> Tensor:
    """Return `[N, M, M] bool` the fresh keys that each entry sees. A shadow sees its own segment and the canvas.

    until: `[N, M]` first column that each entry does not see
    column, segment: `[N, M]` of each entry; the canvas is segment 0
    unseen: `[N, M]` the column of the canvas that a shadow does not see. None if there are no shadows
    """
    seen = column[:, None] < until[..., None]
    if segment is None:
        return seen
    same = segment[..., None] == segment[:, None]
    if unseen is not None:
        shadow = segment != 0
        same = same | (shadow[..., None] & ~shadow[:, None] & (unseen[..., None] != column[:, None]))
    return seen & same


def block_end(column: Tensor, length: int, origin: Tensor | None = None) -> Tensor:
    """Return the end of the block of `length` that contains each column. The columns before `origin` are one block."""
    if origin is None:
        return (column // length + 1) * length
    return ((column - origin) // length + 1).clamp(min=0) * length + origin


def block_causal(queries: Tensor, keys: Tensor, length: int) -> Tensor:
    """Return `[N, M, S] bool` the keys that a row sees under block-causal attention: its block's and earlier ones.

    queries, keys: int64 `[N, M]` and `[N, S]`, positions counted from the row's first token, as are the blocks
    """
    return keys[:, None] < block_end(queries, length)[..., None]


def clean_and_noisy(block: Tensor, clean: Tensor, noisy: Tensor, *, causal: bool = False) -> Tensor:
    """Return `[N, 2L, 2L] bool` the keys that a clean copy of a text and a noisy copy after it see (arXiv 2503.09573).

    A clean block sees the clean blocks up to itself. A noisy block sees the clean blocks before it, and itself. So one
    forward predicts every block as a block-causal model does when the blocks before it are decoded.

    Args:
        block: `[N, L]` the block of each column.
        clean, noisy: `[N, L] bool` columns that exist in each copy.
        causal: a token of the clean copy sees those before it and itself, and none after it in its block.
    """
    own, other = block[:, :, None], block[:, None]
    column = torch.arange(block.shape[1], device=block.device)
    before = column[None] <= column[:, None] if causal else other <= own
    above = torch.cat([clean[:, None] & before, torch.zeros_like(own == other)], 2)
    below = torch.cat([clean[:, None] & (other < own), noisy[:, None] & (other == own)], 2)
    return torch.cat([above, below], 1)


def mask_of(keys: Tensor | None) -> Tensor | None:
    """Return an attention mask `[N, 1, 1|M, S]` of the seen `keys`, `[N, S]` or `[N, M, S]`. None stays None."""
    if keys is None:
        return None
    return keys[:, None] if keys.dim() == 3 else keys[:, None, None]


def predictors(canvas: Canvas, columns: Tensor, shift: bool, seeds: bool, before: Tensor | None = None) -> Tensor:
    """Return `[B, Q]` the column whose hidden state predicts each of `columns [B, Q]`.

    Args:
        shift, seeds: facts of the model, see `ModelSpec`.
        before: `[B] bool` rows whose columns are predicted by the one before each (`Query.shifted`). None for no rows.
    """
    # The row's very first position has none before it and reads its own; the empty slot stays what it is.
    if shift:
        return torch.where((columns > 0) & (columns < canvas.length), columns - 1, columns)
    if seeds:
        shifted = columns == canvas.start[:, None]
        if before is not None:
            shifted = shifted | (before[:, None] & (columns < canvas.length))
        return torch.where((columns > 0) & shifted, columns - 1, columns)
    return columns
