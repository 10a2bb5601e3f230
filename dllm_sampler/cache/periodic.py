"""dInfer's caches: the prefix and the dual cache, with refreshes inside a block, too."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass
class _Periodic(BaseCache):
    every: int | None = 8
    made: Tensor = field(init=False, repr=False, compare=False)  # [B] narrow forwards so far
    fresh: Tensor = field(init=False, repr=False, compare=False)  # [B] bool: the last forward was a refresh

    def __post_init__(self) -> None:
        check_count("cache.every", self.every, optional=True)
        vars(self)["steady"] = self.every is None

    @override
    def begin(self, canvas: Canvas) -> None:
        self.made, self.fresh = torch.zeros_like(canvas.start), torch.zeros_like(canvas.done)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        opens = canvas.age == 0
        return opens if self.every is None else opens | (~self.fresh & (self.made % self.every == 0))

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.fresh = self.due(canvas)
        self.made = self.made + ~self.fresh


@dataclass
class PeriodicPrefix(_Periodic, PrefixCache):
    """Fast-dLLM's prefix cache, with an extra full forward after every few narrow ones.

        computes   all columns from the active block to the end
        reuses     all columns before it
        refreshes  all, when a block opens, and after `every` narrow forwards

    Source: dInfer, arXiv 2510.08666. The extra forward commits like any other. Narrow forwards are counted over the
    whole generation, and a block still opens with a refresh. dInfer makes a narrow forward even after a refresh that
    filled the block. Here that forward is left out.

    Args:
        every: narrow forwards, counted over all blocks, from one refresh of this kind to the next. With None only
            opening blocks refresh.
    """


@dataclass
class PeriodicDual(_Periodic, DualCache):
    """Fast-dLLM's dual cache, with an extra full forward after every few narrow ones.

        computes   the active block
        reuses     all other columns
        refreshes  all, when a block opens, and after `every` narrow forwards

    Source: dInfer, arXiv 2510.08666. See `PeriodicPrefix`.

    Args:
        every: narrow forwards, counted over all blocks, from one refresh of this kind to the next. With None only
            opening blocks refresh.
    """
