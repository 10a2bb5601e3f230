"""The base of Fast-dLLM's caches, which recompute one run of columns after the first forward of a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.values import Canvas


@dataclass
class WindowCache(BaseCache, ABC):
    """A cache whose forwards compute the columns of `span`, or the whole row if a refresh is `due`."""

    refreshes: ClassVar[bool] = True
    steady: ClassVar[bool] = True

    @abstractmethod
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Return `[B]` the first column and `[B]` the end of the columns that a forward computes inside a block."""

    @property
    def back(self) -> int:
        """Number of columns before the block that are computed. A logit shift needs one, to predict the first mask."""
        return int(self.spec.shift)

    def first(self, canvas: Canvas) -> Tensor:
        """Return `[B]` the first column that is computed inside a block."""
        return canvas.start - self.back if self.back else canvas.start

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        (first, end), column = self.span(canvas), canvas.columns()
        return self.due(canvas)[:, None] | ((column >= first[:, None]) & (column < end[:, None]))
