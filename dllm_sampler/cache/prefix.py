"""Fast-dLLM prefix cache: keys and values before the active block are frozen while the block is decoded."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.values import Canvas


@dataclass
class PrefixCache(WindowCache):
    """Recompute from the active block to the end; everything before it is as the block-opening forward left it.

    Source: Fast-dLLM, arXiv 2505.22618. The forward that opens a block computes the whole row, commits like any
    other, and refreshes every slot. Positions from the block on are computed afresh in each step, so their slots
    are never read stale.

    On models with a logit shift (Dream) the window starts one position earlier, with the row that predicts the block's
    first position; published code starts at the block and commits that position by force.
    """

    keeps_noise: ClassVar[bool] = False
    supports_resize: ClassVar[bool] = True  # nothing moves before the block, and all after it is computed

    @override
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        return self.first(canvas), canvas.end
