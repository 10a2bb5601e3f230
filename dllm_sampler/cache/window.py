"""What Fast-dLLM's caches share: a block opens with a whole row, then one run of columns is recomputed."""

from dataclasses import dataclass

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

    def first(self, canvas: Canvas) -> Tensor:
        """`[B]` where the window begins: with the block, or the row that predicts its first position."""
        return canvas.start - 1 if self.spec.shift and not self.compat else canvas.start

    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """`[B]` first column and `[B]` end of what a forward computes inside a block."""
        raise NotImplementedError

    def computes(self, canvas: Canvas) -> Tensor:
        """See `Cache.computes`."""
        (first, end), column = self.span(canvas), canvas.columns()
        return self.due(canvas)[:, None] | ((column >= first[:, None]) & (column < end[:, None]))
