"""The cache of a window that slides: it computes the window and its surroundings, and refreshes after some commits."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.checks import check_choice, check_count
from dllm_sampler.core.values import Canvas, Edit, Query, Readout

Anchor = Literal["both", "last", "window"]


@dataclass
class SlidingCache(BaseCache):
    """A cache for windows that slide: the active block and the columns next to it are computed.

        computes   the active block, `before` columns left and `after` right of it
        reuses     all other columns
        refreshes  all, after `every` commits

    Source: DSB, arXiv 2602.05992, and DCD, arXiv 2601.02076. With `anchor=last` and `before=2`, `after=2` is DCD's
    `dual-delay2`, and `after=null` its `prefix-delay2`. Made for `blocks=sliding`. With other blocks it refreshes when
    a block opens, too. A refresh commits like any other forward. Its own commits count towards the next refresh, and so
    do masks that a stop fills or cuts.

    On models with a logit shift (Dream) the row that predicts the block's first position is computed in any case.

    Args:
        before: columns before the block that are computed. DSB has 24 for LLaDA and 4 for Dream.
        after: columns after the block that are computed. None means all that follow.
        every: commits from one refresh to the next. With 1 every forward computes everything. DSB has the number of
            masks in a window.
        anchor: column that `before` counts from. `window`: the block's first one. `last`: the block's first one in the
            last forward, so that tokens are computed again once they are committed. `window` and `last` do not reach
            before the answer. `both`: `before` columns before the block, and at least all that it has just left (DSB).
    """

    before: int = 24
    after: int | None = 0
    every: int = 32
    anchor: Anchor = "both"
    left: Tensor = field(init=False, repr=False, compare=False)  # [B] number of masks that the last refresh saw
    was: Tensor = field(init=False, repr=False, compare=False)  # [B] start of the block in the last forward

    def __post_init__(self) -> None:
        check_count("cache.before", self.before, 0)
        check_count("cache.after", self.after, 0, optional=True)
        check_count("cache.every", self.every)
        check_choice("cache.anchor", self.anchor, Anchor)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.left, self.was = torch.zeros_like(canvas.start), canvas.start

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return (canvas.age == 0) | (self.left - canvas.masked.sum(1) >= self.every)

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        column = canvas.columns()
        around = (column >= self.first(canvas)[:, None]) & (column < self.end(canvas)[:, None])
        return around | self.due(canvas)[:, None]

    def first(self, canvas: Canvas) -> Tensor:
        """Return `[B]` the first column that a forward computes between two refreshes."""
        shift = int(self.spec.shift)
        if self.anchor == "both":
            return torch.minimum(self.was, canvas.start - max(self.before, shift))
        anchor = self.was if self.anchor == "last" else canvas.start
        return torch.maximum(anchor - self.before, canvas.layout.first) - shift

    def end(self, canvas: Canvas) -> Tensor:
        """Return `[B]` the end of the columns that a forward computes between two refreshes."""
        return canvas.end if self.after is None else torch.minimum(canvas.stop + self.after, canvas.end)

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.left = torch.where(self.due(canvas), canvas.masked.sum(1), self.left)
        self.was = canvas.start
