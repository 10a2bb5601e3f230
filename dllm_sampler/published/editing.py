"""LLaDA2.1's token editing, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.editing import TokenEditing


@dataclass(frozen=True)
class PublishedEditing(TokenEditing):
    """A full block takes one more forward even where nothing can be edited.

    Source: LLaDA2.1, arXiv 2602.08676.
    """

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        edit, made = super().tell(canvas, query, readout, carry)
        if self.edit < 1:
            return edit, made
        left = canvas.eligible(query.positions).any(1)
        return replace(edit, keep_block=left & (made < self.extra)), made
