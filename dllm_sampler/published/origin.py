"""Dream's `origin` as in its published code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.origin import Origin


@dataclass(frozen=True)
class PublishedOrigin(Origin):
    """Dream's `origin` that makes all its steps, even after the last mask.

    Source: Dream, arXiv 2508.15487.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, steps = super().tell(canvas, query, readout, carry)
        last = canvas.age + 1 >= steps
        return replace(edit, keep_block=~last, close_block=last), steps
