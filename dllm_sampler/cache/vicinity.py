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
    """dInfer's vicinity refresh: the active block and the columns near it are recomputed.

        computes   the active block, `before` columns left and `after` right of it
        reuses     all other columns, as the block's first forward saw them
        refreshes  all, when a block opens

    Source: dInfer, arXiv 2510.08666. Keys and values change most near new tokens, so the window
    `[start - before, stop + after)` is recomputed. With `before=0`, `after=0` and `warmup=0` it is `dual`. A generation
    begins with `warmup` forwards of the whole row. dInfer's 4 store nothing, and one more fills its cache, so
    `warmup=5` makes as many. Its iteration smoothing, which mixes a mask's input with the expected embedding, is not
    implemented.

    Args:
        before: columns left of the block that are recomputed. At least one on models with a logit shift (Dream).
        after: columns right of the block that are recomputed.
        warmup: whole forwards at the beginning of a generation. The first forward of a block is always whole.
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
