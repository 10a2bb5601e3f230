"""dInfer's block runner for any scheduler."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class Unrolled(AroundWithState):
    """A scheduler that checks only every few iterations if the block is full, so that some forwards commit nothing.

    Source: dInfer, arXiv 2510.08666, which saves synchronisations with the device this way. At each check, the next
    one is due after `masks // tpf` iterations, within [1, `maximum`].

    Args:
        inner: the scheduler that commits.
        tpf: expected tokens per forward.
        maximum: most iterations from one check to the next.
        cached: count a refresh of `PeriodicPrefix` or `PeriodicDual` and the forward after it as one iteration.
        every: the cache's `every`.
    """

    tpf: int = 8
    maximum: int = 4
    cached: bool = False
    every: int | None = None

    def __post_init__(self) -> None:
        check_count("scheduler.tpf", self.tpf)
        check_count("scheduler.maximum", self.maximum)

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner carry, and `[B]` each: iterations to the next check, those made, true after a refresh."""
        zero = torch.zeros_like(canvas.start)
        return super().init(canvas), zero, zero, zero > 0

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        inner, ahead, made, fresh = carry
        opens = canvas.age == 0
        looks = opens | (ahead == 0)
        ahead = torch.where(looks, (canvas.noise_left() // self.tpf).clamp(1, self.maximum), ahead)
        due = opens if self.every is None else opens | (~fresh & (made % self.every == 0))
        refresh = due & self.cached
        moves = (~refresh).long()
        ahead, made = ahead - moves, made + moves
        edit, inner = self.inner.tell(canvas, query, readout, inner)
        keep_block = ahead > 0 if edit.keep_block is None else edit.keep_block | (ahead > 0)
        return replace(edit, keep_block=keep_block), (inner, ahead, made, refresh)

    def bound(self, tokens: int) -> int:
        """Return the most forwards. Each commit may need `maximum` iterations, and each iteration a refresh."""
        return 2 * self.maximum * super().bound(tokens)
