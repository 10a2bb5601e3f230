"""SVDD: draw one of several drafts of each step by its reward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_choice, check_count, check_inner, check_number
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import PICKS, gumbel, hashed, unit
from dllm_sampler.core.protocols import Context, Scheduler, is_random
from dllm_sampler.core.spec import OwnInputs, PlannedCommits, Traits, UniformNoise, with_bound_fields
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import Reward
from dllm_sampler.schedulers.drafting.choosing import Choosing
from dllm_sampler.schedulers.fixed import FixedSteps

Value = Literal["fill", "masked"]


@dataclass(frozen=True)
class SoftValueGuided(Choosing):
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
    (one more where only some candidates fill a block). With `value=masked` the drafts themselves are valued, without a
    forward.

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
    reward: Any = None
    alpha: float = 0.0
    value: Value = "fill"
    judge: Reward | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("scheduler.candidates", self.candidates)
        check_number("scheduler.alpha", self.alpha, finite=True)
        check_choice("scheduler.value", self.value, Value)
        inner, traits, fill = named(self.inner), check_inner(self.inner).traits, self.looks_ahead
        reasons = {
            "which drafts too": traits.drafts,
            "which reads the device in a step": not traits.graph_safe,
            "which remasks or replaces tokens (scheduler.value=fill)": fill and traits.revises,
            "which has inputs of its own (scheduler.value=fill)": fill and traits.has(OwnInputs),
            "which may leave the active block in a query (scheduler.value=fill)": fill and not traits.asks_block,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why and self.candidates > 1:
            raise UserError(
                "scheduler-incompatible", f"scheduler=svdd cannot draft for {inner}, {why}. Use scheduler.inner=fixed."
            )

    @property
    @override
    def looks_ahead(self) -> bool:
        return self.value == "fill"

    @property
    def traits(self) -> Traits:
        """Traits of a rule that reads the device in each step, and with `value=fill` asks about drafts."""
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
                f"scheduler=svdd chooses among candidates, which are identical: {named(self.inner)} draws nothing."
                " Set a temperature, for example temperature=1, or scheduler.inner={name: fixed, score: random}.",
            )
        ends = spec.eos_ids if self.looks_ahead else ()
        judge = Reward.of(self.reward, "scheduler.reward", context.tokenizer, ends)
        return with_bound_fields(bound, judge=judge, mask_id=spec.mask_id, draws=draws)

    @override
    def pick(self, canvas: Canvas, step: Tensor, ids: Tensor, judged: Tensor) -> Tensor:
        assert self.judge is not None
        values = self.judge(canvas, ids, judged).clamp(min=torch.finfo(torch.float64).min)  # [B, M]; -inf - -inf is NaN
        if self.alpha:
            number = select.arange(self.candidates, values.device).expand_as(values)
            noise = gumbel(unit(hashed(canvas.layout.seeds, step, number, PICKS)))
            values = (values - values.amax(1, keepdim=True)) / self.alpha + noise
        return values.argmax(1).masked_fill(~judged, 0)
