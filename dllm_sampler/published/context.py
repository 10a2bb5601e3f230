"""Nemotron-Labs-Diffusion's `generate` with `causal_context=False`: its scheduler, stop, cache and noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.block_causal import BlockCausalCache, StorePasses
from dllm_sampler.core.around import Around
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import BlockStop, with_finish


@dataclass(frozen=True)
class LeavesAtEnd(Around):
    """A scheduler that closes a block once an end token has no mask before it in the block. Masks may follow it.

    Source: Nemotron-Labs-Diffusion's `generate` with `causal_context=False`.

    Args:
        inner: the scheduler that commits.
        eos: id of the end token.
    """

    eos: int = -1

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = self.inner.tell(canvas, query, readout, carry)
        after = canvas.apply(query.positions, edit)
        known = ((after.masked & after.in_block()).cumsum(1) == 0) & after.in_block()
        return replace(edit, close_block=(known & (after.ids == self.eos)).any(1)), carry


@dataclass(frozen=True)
class StopStored(BlockStop):
    """A stop that ends a row in the forward that stores a block with an end token.

    Source: Nemotron-Labs-Diffusion's `generate` with `causal_context=False`.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        stores = (query.positions == canvas.length).all(1)  # such forwards query no position
        return with_finish(edit, stores & self.ends(after).any(1))


@dataclass
class PrefillsApart(BlockCausalCache):
    """A block-causal cache whose first forward computes only the prompt. A separate forward stores each full block."""

    store_pass: StorePasses = "separate"

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        before = canvas.columns() < canvas.grid_start()[:, None]
        return super().computes(canvas) & (before | (canvas.step > 0)[:, None])


@dataclass(frozen=True)
class BlockDraws(ReplayNoise):
    """Replayed noise whose draws cover the whole block of each row. Forwards that only store draw nothing."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        if not bool((positions < canvas.length).any()):
            return torch.zeros(*positions.shape, vocab, device=positions.device)
        row, at, width = self._places(canvas, positions)
        drawn = torch.rand((len(positions), width, vocab), dtype=torch.float64, generator=self.generator)
        return -torch.log(-torch.log(drawn))[row, at].to(positions.device)

    @override
    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        if not bool((positions < canvas.length).any()):
            return torch.ones(positions.shape, device=positions.device)
        row, at, width = self._places(canvas, positions)
        return torch.rand((len(positions), width), generator=self.generator)[row, at].to(positions.device)

    @staticmethod
    def _places(canvas: Canvas, positions: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the row of each position, its index in the block (both on the CPU), and the widest block's length."""
        width = int((canvas.stop - canvas.start).max())
        at = (positions - canvas.start[:, None]).clamp(0, width - 1).cpu()
        return torch.arange(len(positions))[:, None], at, width
