"""Answers whose number of columns changes while they are decoded: which columns are new, which move, which go.

A canvas reserves `Canvas.new_tokens` columns for each answer. A row uses those before its `end`; the others hold
padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class Resize:
    """What a step changes of the length of answers, once it has written: it inserts columns, then moves the end.

    An inserted column is a copy of the one that it stands behind: of a mask, to get more masks. Columns that do not fit
    into `Canvas.new_tokens` are cut off at the right. Noise is keyed by step and column: after an insertion a column is
    another place of the answer, and no number is drawn twice.
    """

    end: Tensor  # [B] where the row ends, with what is inserted; below the old end it cuts, whatever stands there
    ids: Tensor  # [B] what new columns at the end hold
    masked: Tensor  # [B] bool: these are noise
    behind: Tensor | None = None  # [B] the column behind which columns are inserted
    count: Tensor | None = None  # [B] how many; 0: none. None: none in any row
    reopen: Tensor | None = None  # [B] bool: the next forward opens the block, as it does where columns move or go

    def on(self, canvas: Canvas, live: Tensor) -> Moved:
        """What it does to the rows `live [B] bool` of a canvas; the others stay."""
        column, room = canvas.columns(), (canvas.first + canvas.new_tokens)[:, None]
        before, source, new = canvas.end[:, None], None, torch.zeros_like(canvas.masked)
        opens = torch.zeros_like(live) if self.reopen is None else self.reopen & live
        if self.behind is not None and self.count is not None:
            behind, count = self.behind[:, None], (self.count * live)[:, None]
            inside = (column > behind) & (column < room)
            new = inside & (column <= behind + count)
            source = torch.where(new, behind, torch.where(inside, column - count, column))
            before, opens = before + count, opens | (count[:, 0] > 0)
        least = canvas.first if canvas.given is None else canvas.given  # what is given stays
        end = torch.where(live, torch.minimum(self.end, room[:, 0]).clamp(min=least), canvas.end)
        there, lost = column < end[:, None], end < before[:, 0]
        added = (column >= before) & there
        return Moved(self, live, end, opens | lost, lost, source, (new & there) | added, added, there)


@dataclass(frozen=True)
class Moved:
    """A change of length on one canvas."""

    change: Resize
    live: Tensor  # [B] bool: rows that it is for
    end: Tensor  # [B] of all rows from now on
    opens: Tensor  # [B] bool: rows whose next forward opens the block: what is kept by column is void
    lost: Tensor  # [B] bool: rows that lost columns
    source: Tensor | None  # [B, L+1] the column that each one was; None: no column has moved
    new: Tensor  # [B, L+1] bool: columns that did not exist before
    added: Tensor  # [B, L+1] bool: those at the end
    there: Tensor  # [B, L+1] bool: columns that exist

    def values(self, before: Tensor, fresh: float) -> Tensor:
        """Values `[B, L+1]` of columns, moved with these; `fresh` at new ones and where there is none."""
        moved = before if self.source is None else before.gather(1, self.source)
        return moved.masked_fill(self.new | ~self.there, fresh)

    def applied(self, canvas: Canvas) -> Canvas:
        """Return the canvas after its step, with what has moved. Only this function changes the length of an answer.

        The active block of a row is then as long as a new one. Blocks that inserted columns have filled with committed
        tokens are passed over. A row is done when no column is left of it.
        """
        ids, masked = canvas.ids, canvas.masked
        if self.source is not None:
            ids, masked = ids.gather(1, self.source), masked.gather(1, self.source)
        ids = torch.where(self.added, self.change.ids[:, None], ids)
        masked = torch.where(self.added, self.change.masked[:, None], masked) & self.there
        spare = ~self.there & ~canvas.frozen
        start = torch.minimum(canvas.start, self.end)
        after = replace(
            canvas,
            ids=torch.where(spare, canvas.ids[:, -1:], ids),
            masked=masked,
            end=self.end,
            start=start,
            age=canvas.age.masked_fill(self.opens, 0),
            done=torch.where(self.live, start >= self.end, canvas.done),
        )
        frontier, width = after.frontier(), after.lookahead.clamp(min=1)
        full = (frontier - start) // width * (self.live & (frontier < self.end))  # [B] blocks without noise
        start = start + full * width
        stop = torch.where(self.live, after.block_end(start, after.lookahead), canvas.stop)
        return replace(after, start=start, stop=stop)
