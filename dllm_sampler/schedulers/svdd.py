"""SVDD: draw one of several drafts of each step by its reward."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_choice, check_count, check_inner, check_number
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import PICKS, CounterNoise, candidate_seeds, gumbel, hashed, unit
from dllm_sampler.core.protocols import Carry, Context, Scheduler, is_random
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import OwnInputs, PlannedCommits, Traits, UniformNoise, with_bound_fields
from dllm_sampler.core.statistics import probability
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import NOTHING, Reward
from dllm_sampler.schedulers.fixed import FixedSteps

Value = Literal["fill", "masked"]


class Draft(NamedTuple):
    """A state that one more step of the inner scheduler would lead to."""

    inner: Carry
    ids: Tensor  # [B, L+1]
    masked: Tensor  # [B, L+1] bool
    confidence: Tensor  # [B, L+1] probability of each token when the step committed it
    closed: Tensor  # [B] bool: the block is over


class Held(NamedTuple):
    """The carry of `SoftValueGuided` if drafts wait for a forward."""

    inner: Carry  # at the canvas
    start: Tensor  # [B] start of the block that the drafts are for. -1 without drafts
    step: Tensor  # [B] steps that the inner scheduler took to reach the canvas
    drafts: tuple[Draft, ...]  # M


@dataclass(frozen=True)
class SoftValueGuided(Around):
    """SVDD around another scheduler: of several drafts of each step one is drawn by its reward.

        drafts = the canvas
        while masks remain in the block:
            predictions = model(drafts), in one forward
            value = reward of each draft, its masks filled by its prediction
            canvas = one of drafts, drawn by softmax(value / alpha)
            drafts = candidates times inner(canvas, its prediction), with own noise

    Source: SVDD, arXiv 2408.08252. With the exact soft value, alpha log E[exp(reward / alpha) | draft], and many
    candidates the answers follow the inner scheduler's law times exp(reward / alpha). With fewer candidates or another
    value this is an approximation. The loop is `value=fill` (SVDD-PM). It makes as many forwards as the inner scheduler
    (one more where only some candidates fill a block; if all do, one is taken at once). A forward that opens a block
    computes the canvas alone. With `value=masked` the drafts themselves are valued, without a forward.

    Args:
        inner: the scheduler whose steps are drafted. Tokens or its order must be drawn.
        reward: a function, or `package.module:function`. See `inputs.rewards.Reward` and docs/rewards.md.
        candidates: M, drafts of each step. 1 is the inner scheduler itself.
        alpha: temperature of the choice. 0 takes the highest value, the first one on a tie.
        value: value of a candidate. `fill` is the reward of the answer so far, with the model's best tokens at the
            block's masks and without later blocks. `masked` is the reward of the candidate with its masks, for example
            a learned value.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    candidates: int = 4
    reward: Any = None
    alpha: float = 0.0
    value: Value = "fill"
    judge: Reward | None = field(init=False, default=None, repr=False, compare=False)
    mask_id: int = field(init=False, default=-1)
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        check_count("scheduler.candidates", self.candidates)
        check_number("scheduler.alpha", self.alpha, finite=True)
        check_choice("scheduler.value", self.value, Value)
        inner, traits, fill = named(self.inner), check_inner(self.inner).traits, self.looks_ahead
        reasons = {
            "which drafts too": traits.drafts,
            "whose steps read the device (`traits.graph_safe`)": not traits.graph_safe,
            "which remasks or replaces tokens": fill and traits.revises,
            "which feeds the model inputs other than tokens": fill and traits.has(OwnInputs),
            "which chooses by a rule of its own which positions the model predicts": fill and not traits.asks_block,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why and self.candidates > 1:
            always = traits.drafts or not traits.graph_safe
            where, way_out = ("", "") if always else (" with scheduler.value=fill", ", or scheduler.value=masked")
            raise UserError(
                "scheduler-incompatible",
                f"scheduler=svdd{where} does not support scheduler.inner={inner}, {why}. Use"
                f" scheduler.inner=fixed{way_out}.",
            )

    @property
    def looks_ahead(self) -> bool:
        """True if the next forward computes the drafts, and they are judged with its predictions at their masks."""
        return self.value == "fill" and self.candidates > 1

    @property
    def traits(self) -> Traits:
        """Traits of a rule that reads the device in each step, and with `value=fill` queries drafts."""
        if self.candidates == 1:
            return super().traits
        inner = super().traits.without(UniformNoise)
        own = replace(inner, graph_safe=False, asks_block=False, draws_order=True, scope="model")
        if not self.looks_ahead:
            return own
        return replace(own, drafts=True, scheduled=True).without(PlannedCommits)

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the reward and the mask token, and knows if tokens are drawn."""
        bound, spec = super().bind(context), context.spec
        if self.candidates == 1:
            return bound
        if self.reward is None:
            raise UserError(
                "option-missing", "scheduler=svdd needs a reward. Set scheduler.reward=package.module:function."
            )
        draws = is_random(bound.guides(context.guides))
        order = bound.inner.traits.draws_order and bound.inner.traits.asks_block  # else all candidates ask the same
        if not draws and not order:
            raise UserError(
                "candidates-identical",
                f"scheduler=svdd chooses among candidates, and those of a step of {named(self.inner)} are identical."
                " Set a temperature, for example temperature=1, or scheduler.inner='{name: fixed, score: random}'.",
            )
        ends = spec.eos_ids if self.looks_ahead else ()
        judge = Reward.of(self.reward, "scheduler.reward", context.tokenizer, ends)
        return with_bound_fields(bound, judge=judge, mask_id=spec.mask_id, draws=draws)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout`, with those to repeat a draw and to measure the probability of its tokens."""
        more = {"draw", "probabilities"} if self.candidates > 1 and self.draws else set[str]()
        return super().needs | more

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner if self.looks_ahead else carry

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the inner scheduler's plan. Returns None if drafts wait for a forward."""
        return None if self.looks_ahead else super().ahead(canvas, carry)

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner scheduler's carry, and no drafts."""
        inner = super().init(canvas)
        if self.candidates > 1 and not isinstance(canvas.layout.noise, CounterNoise):
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} does not support noise={type(canvas.layout.noise).__name__}, whose numbers"
                " depend on the order of the draws. Leave out `noise`.",
            )
        if not self.looks_ahead:
            return inner
        none = Draft(inner, canvas.ids, canvas.masked, torch.zeros_like(canvas.ids, dtype=torch.float64), canvas.done)
        zero = torch.zeros_like(canvas.start)
        return Held(inner, zero - 1, zero, (none,) * self.candidates)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query about the M drafts that each row holds."""
        query = super().ask(canvas, carry)
        if not self.looks_ahead:
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
        judged = ~canvas.done & ~readout.confidence.isnan().flatten(1).any(1)  # rows with NaN end with another error
        if self.looks_ahead:
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

    def pick(self, canvas: Canvas, step: Tensor, ids: Tensor, judged: Tensor) -> Tensor:
        """Return `[B]` the number of the draft to take in the rows `judged [B] bool`, 0 in the others.

        Args:
            step: `[B]` number of the step that made the drafts.
            ids: `[B, M, L+1]` the drafts, with the mask token at masks. With `looks_ahead` masks have the model's best
                tokens, or `NOTHING` if they were not queried.
            judged: `[B] bool` rows that take a draft.
        """
        assert self.judge is not None
        values = self.judge(canvas, ids, judged).clamp(min=torch.finfo(torch.float64).min)  # [B, M]; -inf - -inf is NaN
        if self.alpha:
            number = select.arange(self.candidates, values.device).expand_as(values)
            noise = gumbel(unit(hashed(canvas.layout.seeds, step, number, PICKS)))
            values = (values - values.amax(1, keepdim=True)) / self.alpha + noise
        return values.argmax(1).masked_fill(~judged, 0)


def _taken(options: Sequence[Any], pick: Tensor, canvas: Canvas) -> Any:
    """Return a tree of tensors that has each row of the option number `pick [B]`."""
    numbered = enumerate(options[1:], 1)
    return reduce(lambda found, one: where_rows(pick == one[0], one[1], found, canvas.length), numbered, options[0])
