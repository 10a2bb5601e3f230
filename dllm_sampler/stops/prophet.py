"""Prophet: fill all masks once the answer is certain."""

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Stop
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import with_finish


@dataclass(frozen=True)
class Prophet(Stop):
    """A stop that commits every mask at once, when the best token is far above the second on the answer's positions.

    Source: Prophet, arXiv 2508.19982. The gap is between the two best logits, averaged over the positions of a region,
    masked or not. It must reach a bound that falls as decoding proceeds. The stop acts only on forwards that predict
    the whole region and every mask. Under a dual cache these are the ones that open a block.

    Args:
        start: first position of the region, counted from the answer's first one. By default the region is every mask.
        length: positions of the region, if `start` is set. Positions outside the answer do not count. If none is
            inside, the stop never acts.
        early, mid, late: least mean gap at a progress below 0.33, below 0.67, and from there on.
        steps: planned forwards. Progress is then the step's number, from 1, divided by `steps`, as published. By
            default (null) progress is the committed share of the answer.
    """

    fills: ClassVar[bool] = True
    judges_all: ClassVar[bool] = True

    start: int | None = None
    length: int = 5
    early: float = 7.5
    mid: float = 5.0
    late: float = 2.5
    steps: int | None = None

    def __post_init__(self) -> None:
        check_count("stop.length", self.length)
        check_count("stop.steps", self.steps, optional=True)
        for name in ("early", "mid", "late"):  # infinity: never
            check_number(f"stop.{name}", getattr(self, name), least=-inf)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"gap"})

    def region(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` columns of the region that is judged."""
        if self.start is None:
            return canvas.masked
        ahead = canvas.columns() - canvas.layout.first[:, None]
        return (ahead >= max(0, self.start)) & (ahead < self.start + self.length) & canvas.seen()

    @override
    def positions(self, canvas: Canvas) -> Tensor:
        return canvas.masked | self.region(canvas)

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        assert readout.gap is not None
        region = self.region(canvas)
        there = region.gather(1, query.positions)  # [B, Q]
        asked = torch.zeros_like(canvas.masked).scatter(1, query.positions, True)
        covered = (asked | ~self.positions(canvas)).all(1)
        # Truncated to one token (top_p measured), a distribution has no second logit: the gap says nothing then.
        usable = there & (readout.gap[:, 0] < torch.inf)
        gap = readout.gap[:, 0].masked_fill(~usable, 0).sum(1) / there.sum(1).clamp(min=1)
        progress = canvas.progress() if self.steps is None else (canvas.step + 1) / self.steps
        bound = torch.where(progress < 0.33, self.early, torch.where(progress < 0.67, self.mid, self.late))
        fire = covered & there.any(1) & (gap >= bound)
        fill = canvas.masked.gather(1, query.positions) & fire[:, None]
        ids = torch.where(fill, readout.token[:, 0], edit.ids)
        remask = None if edit.remask is None else edit.remask & ~fire[:, None]
        return with_finish(replace(edit, ids=ids, commit=edit.commit | fill, remask=remask), fire)
