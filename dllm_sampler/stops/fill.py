"""d3LLM's early stop: an end-of-text token overwrites everything after it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import PrefixStop, first_of


@dataclass(frozen=True)
class FillStop(PrefixStop):
    """A stop that writes end-of-text tokens after a committed one, and ends the row once no mask is before it.

    Source: the early stop of d3LLM, arXiv 2601.07568. The model's first end-of-text token is written. The model sees
    end-of-text tokens where masks were (with `stop=truncate` it sees nothing there). An end-of-text token that is
    committed farther left fills again. In the published code one forward may still commit masks after an end-of-text
    token. With a scheduler that remasks (`edit.remask`), it fills once the block is over.
    """

    fills: ClassVar[bool] = True
    predicts: ClassVar[bool] = False

    @override
    def positions(self, canvas: Canvas) -> Tensor:  # an end-of-text token may be committed from the first mask on
        return (canvas.columns() > canvas.frontier()[:, None]) & canvas.seen() & ~canvas.layout.frozen

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        stopped = super().__call__(canvas, after, query, readout, edit)
        at, ended = query.positions, first_of(self.ends(after))  # [B, Q], [B]
        other = ~is_end(after.ids.gather(1, at), self.end_ids) | after.masked.gather(1, at)
        fill = other & (at > ended[:, None]) & ~canvas.layout.frozen.gather(1, at)
        fill = fill & self.may_fill(after, edit)[:, None]
        sure = readout.confidence[:, 0] if edit.confidence is None else edit.confidence
        return replace(
            stopped,
            ids=edit.ids.masked_fill(fill, self.end_ids[0]),
            commit=edit.commit | fill,
            remask=torch.zeros_like(fill) if edit.remask is None else edit.remask & ~fill,
            confidence=sure.masked_fill(fill, 1),
        )

    def may_fill(self, after: Canvas, edit: Edit) -> Tensor:
        """Return `[B] bool` rows that are filled in this step if they have an end-of-text token."""
        return torch.ones_like(after.done) if edit.remask is None else after.block_over(edit)
