"""dInfer's vicinity refresh: a dual cache whose recomputed window reaches beyond the block on both sides."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.values import Canvas


@dataclass
class VicinityCache(BaseCache):
    """Recompute the active block and what lies near it; the rest stays as the block-opening forward saw it.

    Source: dInfer, arXiv 2510.08666. Keys and values drift most near what was just committed, so the window
    `[start - before, stop + after)` is kept fresh. A generation begins with `warmup` forwards of the whole row, while
    everything is still in motion. dInfer's warm-up stores nothing, so one more whole forward fills its cache there;
    here each fills the slots, and 5 forwards of warm-up are what dInfer's 4 amount to.

    Args:
        before: columns left of the block; on models with a logit shift (Dream) at least one is recomputed.
        after: columns right of it.
        warmup: whole forwards that a generation begins with; the one that opens a block is whole in any case.
    """

    refreshes: ClassVar[bool] = True

    before: int = 16
    after: int = 16
    warmup: int = 4

    def __post_init__(self) -> None:
        for name in ("before", "after", "warmup"):
            check_count(f"cache.{name}", getattr(self, name), 0)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return (canvas.age == 0) | (canvas.step < self.warmup)

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        column, before = canvas.columns(), max(self.before, int(self.spec.shift))
        near = (column >= canvas.start[:, None] - before) & (column < canvas.stop[:, None] + self.after)
        return near | self.due(canvas)[:, None]
