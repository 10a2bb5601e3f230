"""Draft the next states from the last predictions, and verify them all with one forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drafting.candidates import Branch, Draft
from dllm_sampler.schedulers.drafting.run_ahead import Round, RunAhead, State


@dataclass(frozen=True)
class Drafting(RunAhead):
    """A scheduler that makes several steps of an inner one per forward. A subclass defines `branches`.

    `ask` drafts: the inner scheduler acts on the last predictions as if they did not change. The forward computes the
    canvas (candidate 0) and some of the drafted states. `tell` verifies: the inner scheduler judges the canvas by its
    own predictions. If the next state is a candidate, it judges that one, and so on. The step after the last verified
    state needs no candidate. Each step sees the predictions, carry, step number (which keys the noise) and age of the
    block that the inner scheduler would see alone, so that tokens are the same and only forwards are saved. A forward
    that opens a block has one candidate.

    Args:
        inner: the scheduler to speed up. It asks about its block and does not remask tokens.
        eager: draft into the next block, which opens without a forward of its own if the draft was right. A forward
            ends one block at most. A stop may then leave other tokens after the end token. Not for blocks that their
            first forward sizes, nor for a cache that opening a block refreshes.
    """

    def branches(self, most: int) -> list[Branch]:
        """Return the candidates other than the canvas, the likeliest first. No row has more than `most` masks."""
        raise NotImplementedError

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query about the canvas and the states that it may reach."""
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
        """Return `[B] bool` rows that commit the step after the verified states. A forward ends one block at most."""
        return (after.start == before.start) | (before.start == canvas.start)

    def worth_candidate(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        """Return `[B] bool` rows whose state `after` can be a candidate: it has masks in a block that is computed."""
        if not self.eager:
            return after.start == canvas.start
        return ~after.done & self.commits_next(canvas, before, after)
