"""Changes of the length of answers: where each column of a canvas goes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler.core.values import Canvas, Resize


@dataclass(frozen=True)
class Moved:
    """A change of length on one canvas."""

    change: Resize
    live: Tensor  # [B] bool: rows that change
    end: Tensor  # [B] end of each row after the change
    opens: Tensor  # [B] bool: rows whose next forward opens the block
    lost: Tensor  # [B] bool: rows that lost columns
    source: Tensor | None  # [B, L+1] the former number of each column. None if no column has moved
    new: Tensor  # [B, L+1] bool: columns that did not exist before
    added: Tensor  # [B, L+1] bool: new columns at the end
    there: Tensor  # [B, L+1] bool: columns that exist

    def values(self, before: Tensor, fresh: float) -> Tensor:
        """Return values `[B, L+1]` of columns, moved with the columns.

        Args:
            before: `[B, L+1]` values before the change.
            fresh: value of new columns and of those that do not exist.
        """
        moved = before if self.source is None else before.gather(1, self.source)
        return moved.masked_fill(self.new | ~self.there, fresh)

    def applied(self, canvas: Canvas) -> Canvas:
        """Return the canvas after its step, with the columns moved. Only this function changes the length of an answer.

        The active block of a row is then as long as a new one. Blocks without noise, which inserted columns have
        filled, are skipped. A row is done when none of its columns is left.
        """
        ids, masked = canvas.ids, canvas.masked
        if self.source is not None:
            ids, masked = ids.gather(1, self.source), masked.gather(1, self.source)
        ids = torch.where(self.added, self.change.ids[:, None], ids)
        masked = torch.where(self.added, self.change.masked[:, None], masked) & self.there
        spare = ~self.there & ~canvas.layout.frozen
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
        frontier, lookahead = after.frontier(), after.layout.lookahead
        width = lookahead.clamp(min=1)
        full = (frontier - start) // width * (self.live & (frontier < self.end))  # [B] blocks without noise
        start = start + full * width
        stop = torch.where(self.live, after.block_end(start, lookahead), canvas.stop)
        return replace(after, start=start, stop=stop)


def effect_on(canvas: Canvas, change: Resize, live: Tensor) -> Moved:
    """Return the effect of a change on the rows `live [B] bool` of a canvas. The others stay."""
    column, room = canvas.columns(), canvas.layout.answer_end[:, None]
    before, source, new = canvas.end[:, None], None, torch.zeros_like(canvas.masked)
    opens = torch.zeros_like(live) if change.reopen is None else change.reopen & live
    if change.behind is not None and change.count is not None:
        behind, count = change.behind[:, None], (change.count * live)[:, None]
        inside = (column > behind) & (column < room)
        new = inside & (column <= behind + count)
        source = torch.where(new, behind, torch.where(inside, column - count, column))
        before, opens = before + count, opens | (count[:, 0] > 0)
    end = torch.minimum(change.end, room[:, 0]).clamp(min=canvas.layout.given_end)  # what is given stays
    end = torch.where(live, end, canvas.end)
    there, lost = column < end[:, None], end < before[:, 0]
    added = (column >= before) & there
    return Moved(change, live, end, opens | lost, lost, source, (new & there) | added, added, there)
