"""dInfer's block runner, around any scheduler."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class Unrolled(Around):
    """Look only every few iterations whether the block is full; until then forwards go on that commit nothing.

    Source: dInfer, arXiv 2510.08666, which saves host synchronisations this way. At each look, the next one is due
    after `masks // tpf` iterations, at least one and at most `maximum`. Here `Sampler(poll_every=...)` saves the same
    without a wasted forward.

    Args:
        inner: the scheduler that commits.
        tpf: tokens expected per forward.
        maximum: iterations between two looks at most.
        cached: a refresh of `PeriodicPrefix` or `PeriodicDual` and the narrow forward after it are one iteration.
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
        """The inner carry, `[B]` iterations until the next look, `[B]` iterations made, `[B]` just refreshed."""
        zero = torch.zeros_like(canvas.start)
        return super().init(canvas), zero, zero, zero > 0

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry[0]

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        inner, ahead, made, fresh = carry
        opens = canvas.age == 0
        looks = opens | (ahead == 0)
        ahead = torch.where(looks, (canvas.noise_left() // self.tpf).clamp(1, self.maximum), ahead)
        refresh = self._refreshes(canvas, made, fresh)
        moves = (~refresh).long()
        ahead, made = ahead - moves, made + moves
        edit, inner = self.inner.tell(canvas, query, readout, inner)
        keep_block = ahead > 0 if edit.keep_block is None else edit.keep_block | (ahead > 0)
        return replace(edit, keep_block=keep_block), (inner, ahead, made, refresh)

    def bound(self, tokens: int) -> int:
        """Each commit may be followed by wasted iterations, each iteration by a refresh."""
        return 2 * self.maximum * super().bound(tokens)

    def _refreshes(self, canvas: Canvas, made: Tensor, fresh: Tensor) -> Tensor:
        due = canvas.age == 0
        if self.every is not None:
            due = due | (~fresh & (made % self.every == 0))
        return due & self.cached
