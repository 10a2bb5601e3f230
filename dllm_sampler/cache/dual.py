"""Fast-dLLM's dual cache: keys and values on both sides of the active block are frozen while it is decoded."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.values import Canvas


@dataclass
class DualCache(WindowCache):
    """Fast-dLLM's dual cache: only the active block is recomputed.

        computes   the active block
        reuses     all other columns, as the block's first forward saw them
        refreshes  all, when a block opens

    Source: Fast-dLLM, arXiv 2505.22618. The first forward of a block computes the whole row, commits like any other,
    and refreshes every slot. On models with a logit shift (Dream) the row that predicts the block's first position is
    recomputed, too.
    """

    @override
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        return self.first(canvas), canvas.stop
