"""The recorder of a running generation: the forward that committed each token, and its probability."""

import torch
from torch import Tensor

from dllm_sampler.core.resize import Moved
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Refusals, Spent


class Recorder:
    """Device buffers of a running generation. Nothing is transferred before the end.

    They take 20 bytes per column of a row, 24 with the entropy (24 and 32 for float64 models), and 8 more if lengths
    change. A step takes some ten small operations on the queried positions. The entropy is one more reduction of the
    logits, unless a plug-in needs it anyway.

    Args:
        canvas: the state before the first step.
        dtype: type of the model. Log-probabilities are float64 if it is float64, and float32 otherwise.
        entropy: record the entropy of each committed prediction.
        revises: the scheduler may remask or replace tokens.
        resizes: the scheduler may change the length of answers.
    """

    def __init__(
        self,
        canvas: Canvas,
        dtype: torch.dtype = torch.float32,
        entropy: bool = False,
        revises: bool = True,
        resizes: bool = False,
    ):
        self.revises = revises
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        self.step_map = torch.full_like(canvas.ids, -1)  # [B, L+1] forward that committed each column. -1: none
        self.gone = torch.full_like(canvas.ids, -1)  # [B, L+1] forward that cut off each column. -1: none
        self.logprob = torch.zeros(canvas.ids.shape, dtype=precise, device=canvas.ids.device)  # [B, L+1]
        self.entropy = torch.zeros_like(self.logprob) if entropy else None
        self.born = torch.zeros_like(canvas.ids) if resizes else None  # [B, L+1] first forward that saw each column
        self.revised = torch.zeros_like(canvas.done)  # [B] rows in which a committed token was changed
        self.rejected = torch.zeros_like(canvas.step)  # [B] commits that a guide refused
        self.stuck = torch.zeros_like(canvas.done)  # [B] rows in which a guide refused every commit
        self.nfe = torch.zeros_like(canvas.step)  # [B] passes that the row took part in
        self.computed = torch.zeros_like(canvas.step)  # [B] positions computed for the row

    def note(self, before: Canvas, after: Canvas, query: Query, edit: Edit, readout: Readout, spent: Spent) -> None:
        """Record what one step wrote and cost. Tokens get the number of the row's forward (`Canvas.step`)."""
        self.nfe, self.computed = self.nfe + spent.nfe, self.computed + spent.computed
        at = query.positions
        was, noise = before.masked.gather(1, at), after.masked.gather(1, at)
        if self.revises or edit.remask is not None:
            writable = ~(before.layout.frozen.gather(1, at) | before.done[:, None])
            wrote = edit.commit & ~noise & writable
            other = edit.commit & (edit.ids != before.ids.gather(1, at))
            if edit.remask is not None:
                other = other | edit.remask
                self.step_map.scatter_(1, at.masked_fill(~noise, before.length), -1)
            self.revised |= (other & writable & ~was).any(1)
        else:
            wrote = edit.commit & was & ~noise
        # What was not written goes to the empty slot, whose numbers are never read.
        idle = ~wrote
        at = at.masked_fill(idle, before.length)
        self.step_map.scatter_(1, at, before.step[:, None].masked_fill(idle, -1))
        sure = readout.confidence[:, 0] if edit.confidence is None else edit.confidence
        self.logprob.scatter_(1, at, sure.log().to(self.logprob.dtype))
        if self.entropy is not None and readout.entropy is not None:
            self.entropy.scatter_(1, at, readout.entropy[:, 0].to(self.entropy.dtype))
        if edit.end is not None:
            cut = (before.columns() >= after.end[:, None]) & (before.columns() < before.end[:, None])
            self.gone = torch.where(cut, before.step[:, None], self.gone)

    def refuse(self, refusals: Refusals) -> None:
        """Record what a guide refused in one step."""
        self.rejected += refusals.count
        self.stuck |= refusals.stuck

    def move(self, before: Canvas, moved: Moved) -> None:
        """Move the records of each column with it, after a change of length. Called after `note`."""
        step = before.step[:, None]
        wrote = moved.added & ~moved.change.masked[:, None]  # tokens that the rule has written at the end
        self.step_map = torch.where(wrote, step, moved.values(self.step_map, -1))
        self.logprob = moved.values(self.logprob, 0.0)
        if self.entropy is not None:
            self.entropy = moved.values(self.entropy, 0.0)
        if self.born is not None:
            self.born = moved.values(self.born, 0).masked_fill(moved.new, 0) + moved.new * (step + 1)
        self.revised = self.revised | moved.lost


def aligned(canvas: Canvas, values: Tensor, fill: float) -> Tensor:
    """Return `[B, P+N]` values `[B, L+1]` of a canvas, padded with `fill` so that each answer begins at column P."""
    answer = canvas.requested()  # [B, N]
    size = int(canvas.layout.first.max())
    columns = torch.cat([answer[:, :1] + torch.arange(-size, 0, device=answer.device), answer], 1)  # [B, P+N]
    outside = (columns < 0) | (columns == canvas.length)
    return values.gather(1, columns.clamp(min=0)).masked_fill(outside, fill)
