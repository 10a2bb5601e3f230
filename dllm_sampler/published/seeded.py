"""The block-causal loops of Fast-dLLM v2 and Nemotron-Labs-Diffusion.

In some of them the forward that stores the text before a block predicts the block's first token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.block_causal import BlockCausalCache, StorePasses
from dllm_sampler.cache.sub_block import SubBlockCache
from dllm_sampler.core.around import Around
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import PlannedCommits, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import BlockStop, with_finish


def ends_before_masks(canvas: Canvas, eos: int) -> Tensor:
    """Return `[B] bool` rows whose block has an end-of-text token without a mask before it in the block."""
    known = ((canvas.masked & canvas.in_block()).cumsum(1) == 0) & canvas.in_block()
    return (known & (canvas.ids == eos)).any(1)


@dataclass(frozen=True)
class LeavesAtEnd(Around):
    """A scheduler that closes a block once an end-of-text token has no mask before it in the block.

    Masks may follow the token.

    Source: Nemotron-Labs-Diffusion's `generate` with `causal_context=False`.

    Args:
        inner: the scheduler that commits.
        eos: id of the end-of-text token.
    """

    eos: int = -1

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = self.inner.tell(canvas, query, readout, carry)
        return replace(edit, close_block=ends_before_masks(canvas.apply(query.positions, edit), self.eos)), carry


@dataclass(frozen=True)
class StopStored(BlockStop):
    """A stop that ends a row in the forward that stores a block with an end-of-text token.

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


def seeds(canvas: Canvas) -> Tensor:
    """Return `[B] bool` rows whose forward stores the text before a block and predicts only its first token."""
    return (canvas.age == 0) & (canvas.start == canvas.grid_start()) & (canvas.start > 0)


def prefills(canvas: Canvas) -> Tensor:
    """Return `[B] bool` rows whose forward only stores the prompt's full blocks. The prompt ends inside a block."""
    return (
        (canvas.step == 0)
        & (canvas.start > (0 if canvas.layout.grid is None else canvas.layout.grid.length))
        & ~seeds(canvas)
    )


@dataclass(frozen=True)
class SeededBlocks(Around):
    """A scheduler that commits a block's first token, whatever its confidence, before a forward computes the block.

    Source: Fast-dLLM v2, arXiv 2509.26328. The forward that stores the text before a block predicts the next token with
    its last row. The package's own plug-ins predict this token together with the block, and test it like the others.

    Args:
        inner: the scheduler of all other forwards.
    """

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler. The first position must be predicted, and has a step of its own."""
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
    """`SeededBlocks` that closes a block once an end-of-text token has no mask before it in the block.

    Source: Nemotron-Labs-Diffusion's `generate`. Masks may follow the end-of-text token. The row ends after the forward
    that stores the block. The canvas must be one token longer than the answer, so that the last block is stored, too.

    Args:
        eos: id of the end-of-text token.
    """

    eos: int = -1

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry[1]

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B] bool` rows that have closed a block at an end-of-text token, and the inner carry."""
        return torch.zeros_like(canvas.done), super().init(canvas)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = super().tell(canvas, query, readout, carry[1])
        last = seeds(canvas) & (carry[0] | (canvas.start == canvas.end - 1))
        edit = replace(edit, commit=edit.commit & ~last[:, None])
        left = ends_before_masks(canvas.apply(query.positions, edit), self.eos) & ~seeds(canvas)
        return replace(edit, close_block=left, finish=last), (carry[0] | left, inner)


@dataclass
class StoresApart(BlockCausalCache):
    """A block-causal cache whose forwards that store text compute only that text."""

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        apart = (seeds(canvas) | prefills(canvas))[:, None]
        before = canvas.columns() < canvas.grid_start()[:, None]
        return super().computes(canvas) & (before | ~apart)


@dataclass
class PublishedSubBlockCache(StoresApart, SubBlockCache):
    """A sub-block cache that computes the whole block in the forward after the block's first token."""

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        held = self.held
        super().observe(canvas, query, edit, readout)
        self.held = torch.where(seeds(canvas) | prefills(canvas), held, self.held)


@dataclass(frozen=True)
class PartDraws(ReplayNoise):
    """Replayed noise that covers the active part of a block. A block's first token is the likeliest one."""

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
    """`BlockDraws` with a single draw for a block's first token."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        if not bool(seeds(canvas).any()):
            return super()._tokens(canvas, positions, vocab)
        drawn = -torch.log(torch.empty(vocab).exponential_(generator=self.generator))
        return drawn.expand(*positions.shape, vocab).to(positions.device)
