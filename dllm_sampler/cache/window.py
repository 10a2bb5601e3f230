"""The base of Fast-dLLM's caches: a block opens with a whole row, then one run of columns is recomputed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.values import Canvas


@dataclass
class WindowCache(BaseCache, ABC):
    """Forwards compute the columns of `span`, which is left to the subclass, or where they are `due`, the whole row.

    A refresh is due when a block opens, and then only.
    """

    refreshes: ClassVar[bool] = True

    @property
    @override
    def steady(self) -> bool:
        return True

    @abstractmethod
    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """`[B]` first column and `[B]` end of what a forward computes inside a block."""

    @property
    def back(self) -> int:
        """Number of columns before the block in the window: under a shift, the row that predicts the first one."""
        return int(self.spec.shift)

    def first(self, canvas: Canvas) -> Tensor:
        """`[B]` where the window begins."""
        return canvas.start - self.back if self.back else canvas.start

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        (first, end), column = self.span(canvas), canvas.columns()
        return self.due(canvas)[:, None] | ((column >= first[:, None]) & (column < end[:, None]))
