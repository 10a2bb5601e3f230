"""Draft the next states from the last predictions, and verify them all with one forward."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_inner
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Carry, Context, is_random
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import (
    BlocksOpenedAhead,
    ChangingLength,
    OwnInputs,
    PlannedCommits,
    Traits,
    with_bound_fields,
)
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.drafting.candidates import Branch, Draft


class State(NamedTuple):
    """A state that the inner scheduler reaches by itself."""

    canvas: Canvas  # `age` and `step` count the inner scheduler's steps
    inner: Carry
    candidate: Tensor  # [B] the query's candidate that holds this state
    confidence: Tensor  # [B, Q] probability of each token when the inner scheduler committed it


class Round(NamedTuple):
    """The carry: predictions at the last verified state, and the progress of the inner scheduler."""

    inner: Carry
    start: Tensor  # [B] start of the block that the predictions are for. -1: the next forward opens a block
    age: Tensor  # [B] steps of the inner scheduler in this block
    step: Tensor  # [B] steps of the inner scheduler in all
    positions: Tensor  # [B, Q]
    readout: Readout | None  # [B, 1, Q]. None before the first forward


def undraftable(traits: Traits) -> str | None:
    """Return the reason why the next steps of a scheduler with these traits cannot be drafted, or None if they can."""
    reasons = {
        "drafts too": traits.drafts,
        "remasks or replaces tokens": traits.revises,
        "changes the length of answers": traits.has(ChangingLength),
        "feeds the model inputs other than tokens": traits.has(OwnInputs),
        "chooses by a rule of its own which positions the model predicts": not traits.asks_block,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class Drafting(Around):
    """A scheduler that makes several steps of an inner one per forward. A subclass defines `branches`.

    `ask` drafts: the inner scheduler acts on the last predictions as if they did not change. The forward computes the
    canvas (candidate 0) and some of the drafted states. `tell` verifies: the inner scheduler judges the canvas by its
    own predictions. If the next state is a candidate, it judges that one, and so on. The step after the last verified
    state needs no candidate. Each step sees the predictions, carry, step number (which keys the noise) and age of the
    block that the inner scheduler would see alone, so that tokens are the same and only forwards are saved. A forward
    that opens a block has one candidate.

    Args:
        inner: the scheduler to speed up. In each step it queries all masks of the active block (`Traits.asks_block`).
            It does not remask tokens.
        eager: draft into the next block, which opens without a forward of its own if the draft was right. A forward
            ends one block at most. A stop may then leave other tokens after the end-of-text token. Not for blocks that
            their first forward sizes, nor for a cache that opening a block refreshes.
    """

    eager: bool = False
    mask_id: int = field(init=False, default=-1)
    lookahead: int = field(init=False, default=0)  # columns of the next block that `eager` looks at
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        inner, name, traits = named(self.inner), named(self), check_inner(self.inner).traits
        why = undraftable(traits)
        if why is not None:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={name} does not support scheduler.inner={inner}, which {why}. Use"
                " scheduler.inner=threshold.",
            )
        if self.eager and traits.asks == "window":
            raise UserError(
                "scheduler-incompatible",
                f"scheduler.eager=true needs predictions in the next block, and scheduler.inner={inner} queries the"
                " active block only. Set scheduler.eager=false.",
            )

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler, in a rule that drafts and may commit more than the inner one plans."""
        inner = super().traits.without(PlannedCommits)
        # It counts the inner scheduler's steps in a block.
        own = replace(inner, asks_block=False, drafts=True, scheduled=True, scope="model")
        return own.adding(BlocksOpenedAhead()) if self.eager else own

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the mask token and the block length, and knows if tokens are drawn."""
        if context.spec.mask_id is None:
            raise UserError(
                "mask-token-missing",
                f"scheduler={named(self)} needs a model with a mask token. Use scheduler=block_refine.",
            )
        blocks = context.blocks
        if self.eager and blocks.sizes_on_open:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler.eager=true opens blocks ahead, and blocks={named(blocks)} needs a forward to open one. Use"
                " blocks=fixed.",
            )
        bound = super().bind(context)
        draws = is_random(bound.guides(context.guides))
        lookahead = blocks.lookahead(2**16) if self.eager else 0
        return with_bound_fields(bound, mask_id=context.spec.mask_id, lookahead=lookahead, draws=draws)

    def ahead(self, canvas: Canvas, carry: Carry) -> None:
        """Return None, since the next commits are not known before the forward."""

    @override
    def init(self, canvas: Canvas) -> Round:
        if not isinstance(canvas.layout.noise, CounterNoise):
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} does not support noise={type(canvas.layout.noise).__name__}, whose numbers"
                " depend on the order of the draws. Leave out `noise`.",
            )
        zero = torch.zeros_like(canvas.start)
        return Round(super().init(canvas), zero - 1, zero, zero, canvas.ids[:, :0], None)

    def begin(self, canvas: Canvas, query: Query, carry: Round) -> State:
        """Return the state of candidate 0: the canvas, with the inner scheduler's count of steps."""
        age, zero = torch.where(carry.start == canvas.start, carry.age, 0), torch.zeros_like(canvas.start)
        confidence = torch.zeros(query.positions.shape, dtype=torch.float64, device=zero.device)
        return State(replace(canvas, age=age, step=carry.step), carry.inner, zero, confidence)

    def step(self, state: State, query: Query, readout: Readout) -> State:
        """Return the state after one step of the inner scheduler, which opens the next block if it fills this one."""
        edit, inner = self.inner.tell(state.canvas, query, readout, state.inner)
        edit = replace(edit, commit=edit.commit & (edit.ids != self.mask_id))  # a chosen mask token is still noise
        after = state.canvas.apply(query.positions, edit)
        committed = (state.canvas.masked & ~after.masked).gather(1, query.positions)  # [B, Q]
        confidence = torch.where(committed, readout.confidence[:, 0], state.confidence)
        return State(after.advance(after.block_over(edit), self.lookahead, None), inner, state.candidate, confidence)

    def branches(self, most: int) -> list[Branch]:
        """Return the candidates other than the canvas, the likeliest first. No row has more than `most` masks."""
        raise NotImplementedError

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query, with the canvas and the states that it may reach as candidates."""
        query, most = super().ask(canvas, carry), canvas.layout.width
        if self.eager:
            columns, most = canvas.columns(), min(most + self.lookahead, canvas.layout.longest)
            upto = canvas.next_free(canvas.stop) + self.lookahead
            near = (columns >= canvas.start[:, None]) & (columns < upto[:, None])
            query = Query.at(canvas, select.columns(canvas.masked & near, most))
        if carry.readout is None:  # nothing to draft from
            return replace(query, candidates=Candidates(step=carry.step[:, None])) if self.draws else query
        branches = self.branches(most)
        draft = self.drafted(canvas, carry, max((branch.depth for branch in branches), default=0))
        query = draft.candidates(query, branches)
        return query if self.draws else replace(query, candidates=query.candidates._replace(step=None))

    def drafted(self, canvas: Canvas, carry: Round, depth: int) -> Draft:
        """Return a draft of the next `depth` steps by the last predictions, or of fewer if one commits nothing."""
        assert carry.readout is not None
        query = Query.at(canvas, carry.positions)
        state = self.begin(canvas, query, carry)
        root, going = state.canvas, (carry.start == canvas.start) & ~canvas.done  # [B]
        level, reached = torch.full_like(canvas.ids, depth + 1), torch.zeros_like(canvas.start)
        for number in range(1, depth + 1):
            after = self.propose(state, query, carry.readout)
            committed = state.canvas.masked & ~after.canvas.masked  # [B, L+1]
            going = going & committed.any(1) & self.worth_candidate(canvas, state.canvas, after.canvas)
            level, reached = torch.where(committed, number, level), reached + going
            state = after
        return Draft(root, state.canvas.ids, level, reached)

    def propose(self, state: State, query: Query, readout: Readout) -> State:
        """Return the state after a drafted step: the inner scheduler's, by predictions of an earlier state."""
        return self.step(state, query, readout)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Return the edit of all steps to the last verified candidate, and of the step after it."""
        state = self.begin(canvas, query, carry)
        for _ in range(query.ids.shape[1] - 1):
            state = self.verify(canvas, query, readout, state)
        seen = readout.under(state.candidate)
        after = self.step(state, query, seen)
        state = where_rows(self.commits_next(canvas, state.canvas, after.canvas), after, state, canvas.length)
        now, at = state.canvas, query.positions
        closed = now.start > canvas.start  # [B]
        commit = (canvas.masked & ~now.masked).gather(1, at)
        edit = Edit(now.ids.gather(1, at), commit, keep_block=~closed, close_block=closed, confidence=state.confidence)
        start = torch.where(closed & (now.age == 0), -1, now.start)
        return edit, Round(state.inner, start, now.age, now.step, at, seen)

    def verify(self, canvas: Canvas, query: Query, readout: Readout, state: State) -> State:
        """Return the state after one more step in rows where a candidate holds that state. Other rows stay."""
        after = self.step(state, query, readout.under(state.candidate))
        score = self.fits(query, state, after)  # [B, K]
        live, step = query.candidates.live, query.candidates.step
        if live is not None:
            score = score * live
        if step is not None:  # tokens are drawn with the step's noise
            score = score * (step == after.canvas.step[:, None])
        accepted = score.any(1) & self.worth_candidate(canvas, state.canvas, after.canvas)
        return where_rows(accepted, self.follow(query, state, after, score.argmax(1)), state, canvas.length)

    def fits(self, query: Query, before: State, after: State) -> Tensor:
        """Return `[B, K] int64` the fit of each candidate to a step from `before` to `after`, 0 if it does not fit."""
        return (query.ids == after.canvas.ids.gather(1, query.positions)[:, None]).all(2).long()

    def follow(self, query: Query, before: State, after: State, candidate: Tensor) -> State:
        """Return the state that `candidate [B]` holds."""
        return after._replace(candidate=candidate)

    def commits_next(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        """Return `[B] bool` rows in which this forward may commit the step from `before` to `after`.

        A forward does not complete a second block.
        """
        return (after.start == before.start) | (before.start == canvas.start)

    def worth_candidate(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        """Return `[B] bool` rows whose state `after` can be a candidate: it has masks in a block that is computed."""
        if not self.eager:
            return after.start == canvas.start
        return ~after.done & self.commits_next(canvas, before, after)
