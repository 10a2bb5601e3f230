"""What Fast-dLLM's caches share: a block opens with a whole row, then one run of columns is recomputed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.cache.base import Cache
from dllm_sampler.canvas import Canvas


@dataclass
class WindowCache(Cache):
    """Forwards compute the columns of `span`, which is left to the subclass, or where they are `due`, the whole row.

    A refresh is due when a block opens, and then only.
    """

    compat: bool

    @property
    def steady(self) -> bool:
        """See `Cache.steady`."""
        return True

    @property
    def settles(self) -> bool:
        """See `Cache.settles`."""
        return True

    @property
    def covers(self) -> bool:
        """See `Cache.covers`."""
        return not (self.spec.shift and self.compat)

    def first(self, canvas: Canvas) -> Tensor:
        """`[B]` where the window begins: with the block, or the row that predicts its first position."""
        return canvas.start - 1 if self.spec.shift and not self.compat else canvas.start

    def computes(self, canvas: Canvas) -> Tensor:
        """See `Cache.computes`."""
        (first, end), column = self.span(canvas), canvas.columns()
        return self.due(canvas)[:, None] | ((column >= first[:, None]) & (column < end[:, None]))

    def count(self, canvas: Canvas, limit: Tensor | None = None) -> Tensor | None:
        """See `Cache.count`."""
        if limit is not None:
            return super().count(canvas, limit)
        first, end = self.span(canvas)
        return torch.where(self.due(canvas), canvas.end - canvas.begin, end - first)
