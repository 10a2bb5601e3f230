"""Fast-dLLM dual cache: keys and values on both sides of the active block are frozen while it is decoded."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.values import Canvas


@dataclass
class DualCache(WindowCache):
    """Recompute the active block alone; the prefix and the masks after it stay as the opening forward saw them.

    Source: Fast-dLLM, arXiv 2505.22618. The forward that opens a block computes the whole row, commits like any
    other, and refreshes every slot; each later one overwrites the block's own slots. The window begins at
    `WindowCache.first`.
    """

    @override
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        return self.first(canvas), canvas.stop
