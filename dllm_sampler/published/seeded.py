"""Blocks whose first token comes from the forward that stores the text before them, as published loops have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.sub_block import SubBlockCache
from dllm_sampler.core.around import Around
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import PlannedCommits, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.published.context import BlockDraws


def seeds(canvas: Canvas) -> Tensor:
    """`[B] bool` rows whose forward stores the text before a block and predicts the block's first token, alone."""
    return (canvas.age == 0) & (canvas.start == canvas.grid_start()) & (canvas.start > 0)


def prefills(canvas: Canvas) -> Tensor:
    """`[B] bool` rows whose forward stores the prompt's full blocks and predicts nothing: it ends inside a block."""
    return (
        (canvas.step == 0)
        & (canvas.start > (0 if canvas.layout.grid is None else canvas.layout.grid.length))
        & ~seeds(canvas)
    )


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
        """Forwards that only store ask nothing, the first position must be predicted, and it is a step by itself."""
        return replace(super().traits, needs_every_position=True, asks_block=False).without(PlannedCommits)

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        column, first = canvas.columns(), (canvas.columns() == canvas.start[:, None])
        asked = torch.where(seeds(canvas)[:, None], first, ~prefills(canvas)[:, None] & (column < canvas.length))
        return super().ask(canvas, carry).drop(canvas, asked)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        first, idle = seeds(canvas), prefills(canvas)
        edit, inner = self.inner.tell(canvas, query, readout, carry)
        commit = torch.where(first[:, None], canvas.eligible(query.positions), edit.commit & ~idle[:, None])
        return replace(edit, commit=commit), where_rows(~first & ~idle, inner, carry, canvas.length)

    @override
    def bound(self, tokens: int) -> int:
        return self.inner.bound(tokens) + tokens + 1


@dataclass(frozen=True)
class SeededContext(SeededBlocks):
    """`SeededBlocks` in a loop that leaves a block at an end token, and stores even the last one.

    Source: Nemotron-Labs-Diffusion's `generate`. It leaves a block once an end token has no mask before it, though
    masks may follow, and ends after the forward that stores the block. The canvas is one token longer than the
    answer, so that the last block has such a forward too.

    Args:
        eos: the end token.
    """

    eos: int = -1

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry[1]

    def init(self, canvas: Canvas) -> Carry:
        """`[B] bool` rows that have left a block at an end token; inner."""
        return torch.zeros_like(canvas.done), super().init(canvas)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = super().tell(canvas, query, readout, carry[1])
        last = seeds(canvas) & (carry[0] | (canvas.start == canvas.end - 1))
        edit = replace(edit, commit=edit.commit & ~last[:, None])
        after = canvas.apply(query.positions, edit)
        known = ((after.masked & after.in_block()).cumsum(1) == 0) & after.in_block()
        left = (known & (after.ids == self.eos)).any(1) & ~seeds(canvas)
        return replace(edit, close_block=left, finish=last), (carry[0] | left, inner)


@dataclass
class StoresApart(BlockCausalCache):
    """Its forwards that store text compute that text and nothing else."""

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        apart = (seeds(canvas) | prefills(canvas))[:, None]
        before = canvas.columns() < canvas.grid_start()[:, None]
        return super().computes(canvas) & (before | ~apart)


@dataclass
class PublishedSubBlockCache(StoresApart, SubBlockCache):
    """The block's first forward after the one that seeded it computes the whole block."""

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
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
        part = None if canvas.layout.grid is None else canvas.layout.grid.part
        assert part is not None and positions.shape[0] == 1
        drawn = -torch.log(torch.empty(part, vocab).exponential_(generator=self.generator))
        inside = (positions % part).cpu()
        return drawn[inside].to(positions.device)


@dataclass(frozen=True)
class ContextDraws(BlockDraws):
    """One draw for a seed; then draws that cover the block."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        if not bool(seeds(canvas).any()):
            return super()._tokens(canvas, positions, vocab)
        drawn = -torch.log(torch.empty(vocab).exponential_(generator=self.generator))
        return drawn.expand(*positions.shape, vocab).to(positions.device)
