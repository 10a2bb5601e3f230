"""Blocks whose first token comes from the forward that stores the text before them, as published loops have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.sub_block import SubBlockCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.around import Around
from dllm_sampler.schedulers.rows import choose


def seeds(canvas: Canvas) -> Tensor:
    """`[B] bool` rows whose forward stores the text before a block and predicts the block's first token, alone."""
    return (canvas.age == 0) & (canvas.start == canvas.on_grid(canvas.start)) & (canvas.start > 0)


def prefills(canvas: Canvas) -> Tensor:
    """`[B] bool` rows whose forward stores the prompt's full blocks and predicts nothing: it ends inside a block."""
    assert canvas.grid is not None
    return (canvas.step == 0) & (canvas.start > canvas.grid) & ~seeds(canvas)


@dataclass(frozen=True)
class SeededBlocks(Around):
    """Commit a block's first token, whatever its confidence, from a forward that has nothing of the block.

    Source: Fast-dLLM v2, arXiv 2509.26328. The last row of the forward that stores a block, or the prompt, predicts the
    next token. The clean way predicts it together with the block, by the same row, and tests it like the others.

    Args:
        inner: the scheduler of all other forwards.
    """

    @property
    def traits(self) -> Traits:
        """Forwards that only store ask nothing, and the first position must be predicted."""
        return replace(super().traits, exact=True, asks_block=False)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """See `Scheduler.ask`."""
        column, first = canvas.columns(), (canvas.columns() == canvas.start[:, None])
        asked = torch.where(seeds(canvas)[:, None], first, ~prefills(canvas)[:, None] & (column < canvas.length))
        return super().ask(canvas, carry).drop(canvas, asked)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        first, idle = seeds(canvas), prefills(canvas)
        edit, inner = self.inner.tell(canvas, query, readout, carry)
        commit = torch.where(first[:, None], canvas.eligible(query.positions), edit.commit & ~idle[:, None])
        return replace(edit, commit=commit), choose(~first & ~idle, inner, carry, canvas.length)

    def bound(self, tokens: int) -> int:
        """See `Scheduler.bound`."""
        return self.inner.bound(tokens) + tokens + 1


@dataclass
class StoresApart(BlockCausalCache):
    """Its forwards that store text compute that text and nothing else."""

    def computes(self, canvas: Canvas) -> Tensor:
        """See `Cache.computes`."""
        apart = (seeds(canvas) | prefills(canvas))[:, None]
        before = canvas.columns() < canvas.on_grid(canvas.start)[:, None]
        return super().computes(canvas) & (before | ~apart)


@dataclass
class PublishedSubBlockCache(StoresApart, SubBlockCache):
    """The block's first forward behind the one that seeded it computes the whole block."""

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        """See `Cache.observe`."""
        held = self.held
        super().observe(canvas, query, edit, readout)
        self.held = torch.where(seeds(canvas) | prefills(canvas), held, self.held)


@dataclass(frozen=True)
class PartDraws(ReplayNoise):
    """Draws that cover the active part of a block, masks or not; a seed is the best token, without a draw."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        nothing = torch.zeros(*positions.shape, vocab, device=positions.device)
        if bool((seeds(canvas) | prefills(canvas)).any()) or not bool((positions < canvas.length).any()):
            return nothing
        assert canvas.part is not None and positions.shape[0] == 1
        drawn = -torch.log(torch.empty(canvas.part, vocab).exponential_(generator=self.generator))
        inside = (positions % canvas.part).cpu()
        return drawn[inside].to(positions.device)
