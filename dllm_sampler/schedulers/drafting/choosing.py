"""Several drafts of a scheduler's next step. One becomes the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise, candidate_seeds
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import PlannedCommits
from dllm_sampler.core.statistics import probability
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import NOTHING


class Draft(NamedTuple):
    """A state that one more step of the inner scheduler would lead to."""

    inner: Carry
    ids: Tensor  # [B, L+1]
    masked: Tensor  # [B, L+1] bool
    confidence: Tensor  # [B, L+1] probability of each token when the step committed it
    closed: Tensor  # [B] bool: the block is over


class Held(NamedTuple):
    """The carry of `Choosing` if drafts wait for a forward."""

    inner: Carry  # at the canvas
    start: Tensor  # [B] start of the block that the drafts are for. -1 without drafts
    step: Tensor  # [B] steps that the inner scheduler took to reach the canvas
    drafts: tuple[Draft, ...]  # M


@dataclass(frozen=True)
class Choosing(Around):
    """A scheduler that drafts M next steps of the inner one, each with its own noise, and takes one by `pick`.

    If `looks_ahead` is false, drafts are judged as they are, masks included, in the step that made them. If it is true,
    the next forward computes all M drafts of a row, and its predictions at their masks count too. One draft is taken,
    and M drafts of the following step are made from its predictions. If all drafts of a row fill the block, one is
    taken at once. A forward that opens a block computes the canvas alone.

    Args:
        inner: the scheduler whose steps are drafted.
        candidates: M, the number of drafts. 1 is the inner scheduler itself.
    """

    candidates: int = 4
    mask_id: int = field(init=False, default=-1)
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    @property
    def looks_ahead(self) -> bool:
        """True if the next forward computes the drafts, and they are judged with its predictions at their masks."""
        raise NotImplementedError

    def pick(self, canvas: Canvas, step: Tensor, ids: Tensor, judged: Tensor) -> Tensor:
        """Return `[B]` the number of the draft to take in the rows `judged [B] bool`, 0 in the others.

        Args:
            step: `[B]` number of the step that made the drafts.
            ids: `[B, M, L+1]` the drafts, with the mask token at masks. With `looks_ahead` masks have the model's best
                tokens, or `NOTHING` if they were not queried.
            judged: `[B] bool` rows that take a draft.
        """
        raise NotImplementedError

    @property
    def _holds(self) -> bool:
        return self.candidates > 1 and self.looks_ahead

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout`, with those to repeat a draw and to measure the probability of its tokens."""
        more = {"draw", "probabilities"} if self.candidates > 1 and self.draws else set[str]()
        return super().needs | more

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner if self._holds else carry

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the inner scheduler's plan. Returns None if drafts wait for a forward."""
        return None if self._holds else super().ahead(canvas, carry)

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner scheduler's carry, and no drafts."""
        inner = super().init(canvas)
        if self.candidates > 1 and not isinstance(canvas.layout.noise, CounterNoise):
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} cannot draw candidates from {type(canvas.layout.noise).__name__}. Use the"
                f" default noise.",
            )
        if not self._holds:
            return inner
        none = Draft(inner, canvas.ids, canvas.masked, torch.zeros_like(canvas.ids, dtype=torch.float64), canvas.done)
        zero = torch.zeros_like(canvas.start)
        return Held(inner, zero - 1, zero, (none,) * self.candidates)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query about the M drafts that each row holds."""
        query = super().ask(canvas, carry)
        if not self._holds:
            return query
        holds = self._waits(canvas, carry)
        ids, live = [], []
        for number, draft in enumerate(carry.drafts):
            there = holds & ~draft.closed
            ids.append(torch.where(there[:, None], draft.ids.gather(1, query.positions), query.ids[:, 0]))
            live.append(there if number else there | ~holds)
        step = (carry.step + holds)[:, None]  # keys the noise of what is drafted next
        return replace(query, ids=torch.stack(ids, 1), candidates=Candidates(torch.stack(live, 1), step))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        if self.candidates == 1:
            return self.inner.tell(canvas, query, readout, carry)
        judged = ~canvas.done & ~readout.confidence.isnan().flatten(1).any(1)  # a model that failed is told otherwise
        if self._holds:
            return self._look_ahead(canvas, query, readout, carry, judged)
        made = self._made(canvas, query, readout, carry)
        ids = torch.stack([torch.where(draft.masked, self.mask_id, draft.ids) for _, draft in made], 1)
        edit, draft = _taken(made, self.pick(canvas, canvas.step, ids, judged), canvas)
        return edit, draft.inner

    def _look_ahead(
        self, canvas: Canvas, query: Query, readout: Readout, carry: Held, judged: Tensor
    ) -> tuple[Edit, Carry]:
        holds = self._waits(canvas, carry)
        taken = self.pick(canvas, carry.step, self._filled(query, readout, carry.drafts), holds & judged)
        held = _taken(carry.drafts, taken, canvas)
        inner = where_rows(holds, held.inner, carry.inner, canvas.length)
        at, write = query.positions, holds[:, None] & canvas.masked & ~held.masked
        now = canvas.apply(at, Edit(held.ids.gather(1, at), write.gather(1, at)))
        now = replace(now, step=carry.step + holds)
        over = holds & held.closed

        seen, asked = readout.under(taken), replace(query.under(taken), ids=now.ids.gather(1, at)[:, None])
        drafts = tuple(draft for _, draft in self._made(now, asked, seen, inner))
        full = torch.stack([draft.closed for draft in drafts]).all(0) & judged & ~over & (canvas.noise_left() > 0)
        ids = torch.stack([torch.where(draft.masked, NOTHING, draft.ids) for draft in drafts], 1)
        last = _taken(drafts, self.pick(canvas, now.step, ids, full), canvas)
        inner = where_rows(full, last.inner, inner, canvas.length)
        fills = full[:, None] & now.masked & ~last.masked
        ids, sure = torch.where(fills, last.ids, now.ids), torch.where(fills, last.confidence, held.confidence)
        closed = over | full
        edit = Edit(
            ids.gather(1, at),
            (write | fills).gather(1, at),
            keep_block=~closed,
            close_block=closed,
            confidence=sure.gather(1, at),
        )
        return edit, Held(inner, canvas.start.masked_fill(closed, -1), now.step + full, drafts)

    def _made(self, canvas: Canvas, query: Query, readout: Readout, inner: Carry) -> list[tuple[Edit, Draft]]:
        """Return M next steps of the inner scheduler by `readout [B, 1, Q]`. The first has the row's own noise."""
        made = []
        for number in range(self.candidates):
            place, seen = canvas, readout
            if number:
                seeds = candidate_seeds(canvas, number)
                if not self.inner.traits.has(PlannedCommits):  # its order is fixed before
                    place = canvas.with_layout(seeds=seeds)
                if self.draws:
                    assert readout.draw is not None and readout.probabilities is not None
                    token = readout.draw.seeded(seeds)(readout.draw.logits)
                    seen = replace(readout, token=token, confidence=probability(readout.probabilities, token))
            edit, after_inner = self.inner.tell(place, query, seen, inner)
            sure = seen.confidence[:, 0] if edit.confidence is None else edit.confidence
            edit = replace(edit, commit=edit.commit & (edit.ids != self.mask_id), confidence=sure)
            after = canvas.apply(query.positions, edit)
            row = torch.zeros_like(after.ids, dtype=torch.float64).scatter(1, query.positions, sure.double())
            made.append((edit, Draft(after_inner, after.ids, after.masked, row, after.block_over(edit))))
        return made

    def _filled(self, query: Query, readout: Readout, drafts: Sequence[Draft]) -> Tensor:
        """Return `[B, M, L+1]` the drafts with the model's best tokens at queried masks, and `NOTHING` at others."""
        best = readout.token
        if self.draws:
            assert readout.draw is not None
            best = readout.draw.greedy()(readout.draw.logits)
        filled = []
        for number, draft in enumerate(drafts):
            known = torch.where(draft.masked, NOTHING, draft.ids)
            open_ = draft.masked.gather(1, query.positions)
            at = torch.where(open_, best[:, number], known.gather(1, query.positions))
            filled.append(known.scatter(1, query.positions, at))
        return torch.stack(filled, 1)

    @staticmethod
    def _waits(canvas: Canvas, carry: Held) -> Tensor:
        """Return `[B] bool` rows whose drafts wait for a forward."""
        return (carry.start == canvas.start) & ~canvas.done


def _taken(options: Sequence[Any], pick: Tensor, canvas: Canvas) -> Any:
    """Return a tree of tensors that has each row of the option number `pick [B]`."""
    numbered = enumerate(options[1:], 1)
    return reduce(lambda found, one: where_rows(pick == one[0], one[1], found, canvas.length), numbered, options[0])
