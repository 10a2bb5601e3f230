"""Fast-dLLM dual cache: keys and values on both sides of the active block are frozen while it is decoded."""

from dataclasses import dataclass

from torch import Tensor

from dllm_sampler.cache.base import Cache
from dllm_sampler.canvas import Canvas


@dataclass
class DualCache(Cache):
    """Recompute the active block alone; the prefix and the masks behind it stay as the opening forward saw them.

    Source: Fast-dLLM, arXiv 2505.22618. The forward that opens a block computes the whole row, commits like any
    other, and refreshes every slot; each later one overwrites the block's own slots.

    Args:
        compat: as in `PrefixCache`.
    """

    compat: bool = False

    @property
    def steady(self) -> bool:
        """See `Cache.steady`."""
        return True

    @property
    def settles(self) -> bool:
        """See `Cache.settles`."""
        return True

    def computes(self, canvas: Canvas) -> Tensor:
        """See `Cache.computes`."""
        back = int(self.spec.shift and not self.compat)
        column, due = canvas.columns(), self.due(canvas)[:, None]
        return due | ((column >= canvas.start[:, None] - back) & (column < canvas.stop[:, None]))
