"""dKV-Cache-Greedy: a step computes what it commits, what the last step committed, and a few masks around."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, written
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Cache, Context
from dllm_sampler.core.spec import PlannedCommits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError


@dataclass
class GreedyCache(BaseCache):
    """dKV-Cache-Greedy: only positions near the commits of a step are computed.

        computes   commits of this step and the last, `window` masks at each new one
        reuses     all other positions as they were last computed, also masks
        refreshes  all, every `refresh_every` forwards of a block

    Source: dKV-Cache-Greedy, arXiv 2505.15781, published for LLaDA. Here it also works under a logit shift. Between
    refreshes the number of computed positions does not grow with the canvas. The positions that a step commits must be
    known before its forward, as with `scheduler=random_order`. As in the published code, a window takes masks outwards
    from the position, left and right in turns, anywhere on the canvas.

    Args:
        refresh_every: forwards from one full forward to the next, counted in each block. A block opens with a full
            forward. 1 never reuses.
        window: number of masks around each position that is committed.
    """

    refresh_every: int = 2
    window: int = 4
    ahead: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] see `Planner.ahead`
    most: int = field(init=False, default=0, repr=False, compare=False)  # the most commits of a row in a forward
    wrote: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: written by the last step

    def __post_init__(self) -> None:
        check_count("cache.refresh_every", self.refresh_every)
        check_count("cache.window", self.window, 0)

    @override
    def bind(self, context: Context) -> Cache:
        if context.scheduler is not None and not context.scheduler.traits.has(PlannedCommits):
            raise UserError(
                "cache-incompatible",
                f"cache={named(self)} must know before each forward what it commits, and"
                f" scheduler={named(context.scheduler)} does not plan that. Use"
                " scheduler=random_order, or another cache, for example cache=dkv.",
            )
        return super().bind(context)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.ahead, self.wrote = torch.zeros_like(canvas.ids), torch.zeros_like(canvas.masked)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return canvas.age % self.refresh_every == 0

    def expect(self, ahead: Tensor, most: int) -> None:
        """Take note of what the next forward commits. See `Foresees.expect`."""
        self.ahead, self.most = ahead, most

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        ahead = self.ahead > 0
        if self.spec.shift:
            ahead = ahead | ahead.roll(-1, 1)  # the rows that predict
        chosen = (ahead | self.wrote) & canvas.seen()
        free = canvas.masked & ~chosen
        for place in range(1, self.most + 1):
            own = self.ahead == place  # [B, L+1], no column if the row commits fewer
            away = canvas.columns() - own.long().argmax(1, keepdim=True)
            turn = torch.where(away < 0, -2 * away - 1, 2 * away)  # left comes before right
            near = select.top(-turn.double(), free, self.window * own.any(1))
            chosen, free = chosen | near, free & ~near
        return chosen | self.due(canvas)[:, None]

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.wrote = written(canvas, query, edit)
