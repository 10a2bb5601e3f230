"""Fast-dLLM prefix cache: keys and values before the active block are frozen while the block is decoded."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.values import Canvas


@dataclass
class PrefixCache(WindowCache):
    """Fast-dLLM's prefix cache: the columns before the active block are reused.

        computes   all columns from the active block to the end
        reuses     all columns before it, as the block's first forward saw them
        refreshes  all, when a block opens

    Source: Fast-dLLM, arXiv 2505.22618. The first forward of a block computes the whole row, commits like any other,
    and refreshes every slot.

    On models with a logit shift (Dream) the row that predicts the block's first position is recomputed, too. Published
    code starts at the block and commits that position in the first forward, whatever its confidence.
    """

    keeps_noise: ClassVar[bool] = False
    supports_resize: ClassVar[bool] = True  # nothing moves before the block, and all after it is computed

    @override
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        return self.first(canvas), canvas.end
