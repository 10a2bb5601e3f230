"""Feynman-Kac steering: rows whose answers so far have a higher reward are copied."""

from dataclasses import dataclass, field
from math import log
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.checks import check_choice, check_count, check_number
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import candidate_seeds
from dllm_sampler.core.protocols import Carry, Context, Meeting, Resampled, Scheduler
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import NOTHING, Reward
from dllm_sampler.particles.resampling import Resampling, judge_of, rewards

Potential = Literal["diff", "max", "add", "rt"]


class Past(NamedTuple):
    """The rewards of a row at earlier meetings."""

    level: Tensor  # [B] float64 reward that the potential compares with: the last one, the largest one, or the sum
    product: Tensor  # [B] float64 logarithm of the product of all potentials
    weight: Tensor  # [B] float64 logarithm of the product since the last resampling


@dataclass(frozen=True)
class Steering(Resampling):
    """Rows weighted by the reward of the answer so far. The row with the highest reward is the answer.

    Source: Feynman-Kac steering, arXiv 2501.06848. With many rows the answers, drawn in proportion to their weights,
    follow the sampler's law times exp(strength * reward). At a meeting within a block, masks that the last forward
    predicted are filled with drawn tokens. Other masks are left out of the answer. As in the published code, the reward
    of an unfinished answer is the logarithm of the mean of exp(reward) over several draws.

    Args:
        reward: a function, or `package.module:function`; see `inputs.rewards.Reward` and docs/rewards.md.
        strength: lambda, factor of the reward.
        potential: `diff` is the growth of the reward since the last meeting. `rt` is the reward, `max` the largest one
            so far, `add` the sum so far. With these three the last meeting divides by the factors of the earlier ones.
        every: forwards of a row from one meeting to the next. With None rows meet after each block.
        fills: draws for the masks of an unfinished answer. The first one has the tokens that the step itself drew.
        ess: as in `Resampling`. The default, None, resamples at every meeting, as the published code.
    """

    reward: Any = None
    strength: float = 10.0
    potential: Potential = "diff"
    every: int | None = None
    fills: int = 1
    ess: float | None = None
    judge: Reward | None = field(init=False, default=None, repr=False, compare=False)
    predicts: bool = field(init=False, default=False, repr=False, compare=False)  # a meeting may be within a block

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("particles.strength", self.strength, finite=True)
        check_choice("particles.potential", self.potential, Potential)
        check_count("particles.every", self.every, optional=True)
        check_count("particles.fills", self.fills)

    @override
    def bind(self, context: Context) -> Self:
        bound, name = super().bind(context), f"particles={named(self)}"
        within = self.every is not None or context.blocks.several or context.blocks.slides
        if self.fills > 1 and not within:
            raise UserError(
                "option-not-applicable",
                f"particles.fills={self.fills} has no effect: {name} compares rows at the ends of blocks, where no mask"
                " is left. Remove particles.fills, or set particles.every.",
            )
        judge = judge_of(self.reward, name, context)
        return with_bound_fields(bound, judge=judge, predicts=within and self.count > 1)

    @override
    def around(self, scheduler: Scheduler) -> Scheduler:
        return Predicting(scheduler, self.fills) if self.predicts else scheduler

    @override
    def init(self, canvas: Canvas) -> Carry:
        zero = torch.zeros(canvas.start.shape, dtype=torch.float64, device=canvas.start.device)
        return Past(torch.full_like(zero, -torch.inf) if self.potential == "max" else zero, zero, zero)

    @override
    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        past: Past = carry
        reward = self.value(meeting)
        level = {"max": past.level.maximum(reward), "add": past.level + reward}.get(self.potential, reward)
        gained = self.strength * (level - past.level if self.potential == "diff" else level)
        if self.potential != "diff":
            gained = torch.where(
                meeting.final.repeat_interleave(self.count), self.strength * reward - past.product, gained
            )
        weight = past.weight + gained
        ancestors = self.ancestors(meeting, weight.view_as(meeting.log_p))
        after = Past(level, past.product + gained, weight.masked_fill(ancestors.flatten() >= 0, 0))
        return Resampled(weight.view_as(meeting.log_p), ancestors, after)

    def value(self, meeting: Meeting) -> Tensor:
        """Return `[B] float64` the reward of each answer: log mean exp over the draws for its masks."""
        assert self.judge is not None
        found = rewards(self.judge, meeting, meeting.carry[1] if self.predicts else None)
        return found.logsumexp(1) - log(found.shape[1]) if found.shape[1] > 1 else found[:, 0]

    @override
    def rate(self, meeting: Meeting, carry: Carry, likelihood: Tensor | None) -> Tensor:
        assert self.judge is not None
        return rewards(self.judge, meeting).view_as(meeting.log_p)


@dataclass(frozen=True)
class Predicting(AroundWithState):
    """A scheduler that also stores the tokens drawn for masks, for the reward of an unfinished answer.

    Args:
        inner: the scheduler that decides the commits.
        fills: draws for each mask.
    """

    fills: int = 1

    @property
    def stands_for(self) -> Scheduler:
        """The scheduler that the user named."""
        return self.inner

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | ({"draw", "logits"} if self.fills > 1 else set())

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner carry, and `[B, fills, L+1]` tokens with `NOTHING` where none was predicted."""
        return super().init(canvas), canvas.ids.new_full((len(canvas.ids), self.fills, canvas.length + 1), NOTHING)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = self.inner.tell(canvas, query, readout, carry[0])
        seen = readout if edit.candidate is None else readout.under(edit.candidate)
        drawn = [edit.ids]
        for number in range(1, self.fills):
            assert seen.draw is not None
            drawn.append(seen.draw.seeded(candidate_seeds(canvas, number))(seen.draw.logits)[:, 0])
        tokens = torch.stack(drawn, 1)  # [B, fills, Q]
        at = query.positions[:, None].expand_as(tokens)
        return edit, (inner, torch.full_like(carry[1], NOTHING).scatter(2, at, tokens))
