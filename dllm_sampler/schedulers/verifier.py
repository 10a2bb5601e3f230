"""Draft and verify: the next states are guessed from the last predictions, and one forward checks them all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.around import Around
from dllm_sampler.schedulers.rows import choose

Branch = tuple[int, int]  # the first so many guessed steps, and one later one besides (0: none)


class Held(NamedTuple):
    """What a round leaves for the next: predictions at the accepted state, and where the inner scheduler stands."""

    inner: Carry
    start: Tensor  # [B] the block that the predictions are for; -1: none, the next forward opens one
    age: Tensor  # [B] the inner scheduler's steps in this block
    step: Tensor  # [B] and in all
    positions: Tensor  # [B, Q]
    readout: Readout | None  # [B, 1, Q]


class Walked(NamedTuple):
    """Where a walk stands in each row."""

    state: Canvas  # as the inner scheduler alone would have it
    inner: Carry
    node: Tensor  # [B] the candidate that is this state
    sure: Tensor  # [B, Q] probability of each token at its commit


class Guess(NamedTuple):
    """The steps that the inner scheduler would take if predictions stayed."""

    token: Tensor  # [B, L+1]
    level: Tensor  # [B, L+1] the step, from 1, that writes it
    depth: Tensor  # [B] steps worth a branch


@dataclass(frozen=True)
class Verifier(Around):
    """Run the inner scheduler several steps ahead per forward, and come out exactly where it would.

    `ask` lets the inner scheduler act on the last predictions as if they did not change: that guesses its next
    states, and the forward computes the canvas (candidate 0) and some of them (`branches`). `tell` then walks: the
    inner scheduler judges the canvas by its own predictions; if the state it makes is among the candidates, it judges
    that one next, and so on. Each of its steps sees the predictions, the carry, the step number (which keys the
    noise) and the age of the block that it would see alone, so its states, tokens and later carry are the same; only
    forwards are saved. A forward that opens a block has one candidate.

    Args:
        inner: the scheduler whose decoding is sped up: one that asks for its block and takes nothing back.
        eager: guess over the end of the block, into the next one, and open that without a forward of its own where
            the guess was right (one block ends per forward at most; a stop may then leave other tokens behind the
            end token). It needs blocks that are not sized on opening, and a cache that opening a block does not
            refresh.
    """

    late: ClassVar[int] = 0  # steps that candidate 0 is ahead: made certain by one forward, written by the next

    eager: bool = False
    mask_id: int = field(init=False, default=-1)
    lookahead: int = field(init=False, default=0)  # columns of the next block that `eager` looks at
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        inner, name, traits = type(self.inner).__name__, type(self).__name__, self.inner.traits
        if traits.drafts:
            raise UserError(f"scheduler={name} cannot speed up {inner}, which drafts already: leave one of them out")
        if traits.revises or traits.leave_one_out or not traits.asks_block:
            raise UserError(
                f"scheduler={name} cannot look ahead for {inner}, which takes tokens back or chooses what to ask in"
                f" each step: use another scheduler inside {name}, threshold say, or {inner} alone"
            )
        if self.eager and traits.asks == "window":
            raise UserError(
                f"scheduler.eager asks for masks of two blocks, and {inner} wants a whole block: use eager=false"
            )

    @property
    def traits(self) -> Traits:
        """It drafts, and may commit more than the inner scheduler plans."""
        return replace(super().traits, asks_block=False, plans=False, drafts=True, opens_ahead=self.eager)

    def inside(self, carry: Carry) -> Carry:
        """See `Around.inside`."""
        return carry.inner

    def bind(self, context: Context) -> Self:
        """Take the mask token, the length of blocks, and whether branches need noise of their own.

        What a branch holds is what stands there in the mask token's place.
        """
        if context.spec.mask_id is None:
            raise UserError(
                f"scheduler={type(self).__name__} tells branches apart by their mask tokens, and this model has none:"
                f" use {type(self.inner).__name__} alone"
            )
        blocks = context.blocks
        if self.eager and blocks.sizes_on_open:
            raise UserError(
                f"scheduler.eager opens a block ahead of time, and blocks={type(blocks).__name__} sizes it on the"
                " forward that opens it: use blocks=fixed, or eager=false"
            )
        bound = super().bind(context)
        draws = context.draws or any(guide.draws for guide in bound.guides(()))
        object.__setattr__(bound, "mask_id", context.spec.mask_id)
        object.__setattr__(bound, "lookahead", blocks.lookahead(2**16) if self.eager else 0)
        object.__setattr__(bound, "draws", draws)
        return bound

    def ahead(self, canvas: Canvas, carry: Carry) -> None:
        """See `Traits.plans`: not known."""

    def branches(self, most: int) -> list[Branch]:
        """The candidates beside the canvas, the likeliest first, where no row has more than `most` masks."""
        raise NotImplementedError

    def init(self, canvas: Canvas) -> Held:
        """See `Scheduler.init`."""
        if not isinstance(canvas.noise, CounterNoise):
            raise UserError(
                f"scheduler={type(self).__name__} looks at several steps at once, and {type(canvas.noise).__name__}"
                " draws in the order of steps: use the default noise"
            )
        zero = torch.zeros_like(canvas.start)
        return Held(super().init(canvas), zero - 1, zero, zero, canvas.ids[:, :0], None)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The inner scheduler's query, for the canvas and for what it may become."""
        query, width = super().ask(canvas, carry), canvas.width
        if self.eager:
            columns, width = canvas.columns(), min(width + self.lookahead, canvas.new_tokens)
            near = (columns >= canvas.start[:, None]) & (columns < canvas.stop[:, None] + self.lookahead)
            query = Query.at(canvas, select.columns(canvas.masked & near, width))
        # What is written late must be asked even where nothing predicts it any more.
        exact, step = query.exact or self.late > 0, carry.step[:, None] if self.draws else None
        query = replace(query, step=step, exact=exact)
        branches = self.branches(width)
        if canvas.branches is not None:
            branches = branches[: canvas.branches - 1]
        if carry.readout is None or not (branches or self.late):
            return query
        late = self.late
        guess = self._guess(canvas, carry, late + max((max(branch) for branch in branches), default=0))
        token, level = guess.token.gather(1, query.positions), guess.level.gather(1, query.positions)
        now, ids, steps, live = query.ids[:, 0], [], [], []
        for first, extra in [(0, 0), *branches]:
            there = guess.depth >= late + max(first, extra)  # [B]
            taken = (level <= late + first) | (level == late + extra) & (extra > 0)
            ids.append(torch.where(taken & there[:, None], token, now))
            steps.append(carry.step + torch.where(there, late, 0) + first + (extra > 0))  # what opens is not late
            live.append(there)
        step = torch.stack(steps, 1) if self.draws else None
        live[0] = torch.ones_like(live[0])  # the canvas itself
        return replace(query, ids=torch.stack(ids, 1), step=step, live=torch.stack(live, 1))

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Walk along the candidates as far as the inner scheduler goes, and take its next step, which is certain."""
        at = query.positions
        here = self._begin(canvas, query, carry)
        for _ in range(query.ids.shape[1] - 1):
            here = self._walk(canvas, query, readout, here)
        seen = readout.of(here.node)
        next_ = self._step(here, query, seen)
        here = choose(self._certain(canvas, here.state, next_.state), next_, here, canvas.length)
        state, moved = here.state, here.state.start > canvas.start  # [B] the block is through
        commit = (canvas.masked & ~state.masked).gather(1, at)
        edit = Edit(state.ids.gather(1, at), commit, hold=~moved, leave=moved, confidence=here.sure)
        start = torch.where(moved & (state.age == 0), -1, state.start)
        return edit, Held(here.inner, start, state.age, state.step, at, seen)

    def bound(self, tokens: int) -> int:
        """Never more than the inner scheduler takes."""
        return self.inner.bound(tokens)

    def _stand(self, canvas: Canvas, carry: Held, query: Query) -> Walked:
        """The canvas as the inner scheduler counts its steps, which is candidate 0."""
        age, zero = torch.where(carry.start == canvas.start, carry.age, 0), torch.zeros_like(canvas.start)
        sure = torch.zeros(query.positions.shape, dtype=torch.float64, device=zero.device)
        return Walked(replace(canvas, age=age, step=carry.step), carry.inner, zero, sure)

    def _begin(self, canvas: Canvas, query: Query, carry: Held) -> Walked:
        """Where a walk begins: candidate 0."""
        return self._stand(canvas, carry, query)

    def _step(self, here: Walked, query: Query, readout: Readout) -> Walked:
        """One step of the inner scheduler, and on to the next block where it fills this one."""
        at = query.positions
        edit, inner = self.inner.tell(here.state, query, readout, here.inner)
        edit = replace(edit, commit=edit.commit & (edit.ids != self.mask_id))  # that would be noise still
        after = here.state.apply(at, edit)
        made = (here.state.masked & ~after.masked).gather(1, at)  # [B, Q]
        sure = torch.where(made, readout.confidence[:, 0], here.sure)
        return Walked(after.advance(after.block_over(edit), self.lookahead, None), inner, here.node, sure)

    def _draft(self, here: Walked, query: Query, readout: Readout) -> Walked:
        """A guessed step after the first one, which is certain."""
        return self._step(here, query, readout)

    def _walk(self, canvas: Canvas, query: Query, readout: Readout, here: Walked) -> Walked:
        """One step along the candidates, in the rows where the state it leads to is among them."""
        there = self._step(here, query, readout.of(here.node))
        same = (query.ids == there.state.ids.gather(1, query.positions)[:, None]).all(2)  # [B, K]
        if query.live is not None:
            same = same & query.live
        if query.step is not None:
            same = same & (query.step == there.state.step[:, None])  # its tokens are drawn with the step's noise
        found = same.any(1) & self._foreseen(canvas, here.state, there.state)
        return choose(found, there._replace(node=same.long().argmax(1)), here, canvas.length)

    def _certain(self, canvas: Canvas, now: Canvas, then: Canvas) -> Tensor:
        """`[B] bool` rows whose step from the accepted state `now` is taken at once: one block is left per forward."""
        return (then.start == now.start) | (now.start == canvas.start)

    def _foreseen(self, canvas: Canvas, now: Canvas, then: Canvas) -> Tensor:
        """`[B] bool` rows whose state `then` is worth a branch: it has masks to predict, in this block or the next."""
        inside = then.start == canvas.start
        return ~then.done & (self._certain(canvas, now, then) if self.eager else inside)

    def _guess(self, canvas: Canvas, carry: Held, depth: int) -> Guess:
        """What the inner scheduler would do next if predictions stayed."""
        assert carry.readout is not None
        query = Query.at(canvas, carry.positions)
        here = self._stand(canvas, carry, query)
        level, depths = torch.full_like(canvas.ids, depth + 1), torch.zeros_like(canvas.start)
        going = (carry.start == canvas.start) & ~canvas.done
        for step in range(1, depth + 1):
            next_ = (self._step if step == 1 else self._draft)(here, query, carry.readout)
            made = here.state.masked & ~next_.state.masked  # [B, L+1]
            going = going & made.any(1) & self._foreseen(canvas, here.state, next_.state)
            level, depths = torch.where(made, step, level), depths + going
            here = next_
        return Guess(here.state.ids, level, depths)
