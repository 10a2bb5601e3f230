"""Fixed steps: a schedule decides how many positions to commit, and a score decides which."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count, check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import (
    SharedSteps,
    check_eps,
    equal_steps,
    even_rest,
    plan_block,
    rounded_share,
    timestep_share,
    uniform_share,
)
from dllm_sampler.schedulers.score import Score, rate, score_needs

Schedule = Literal["uniform", "timestep", "even", "rounded", "cosine"]
ROUNDED = ("rounded", "cosine")


@dataclass(frozen=True)
class FixedSteps(SharedSteps, Scheduler):
    """A fixed number of steps: a schedule decides how many masks are committed, and a score decides which.

        while masks remain in the block:
            token, score = model(canvas)
            n = number of masks due in this step, by steps and schedule
            commit the n masks with the highest score, in the last step all

    Source: LLaDA, arXiv 2502.09992 (`uniform`, confidence or random), Dream, arXiv 2508.15487 (`timestep`; its
    `maskgit_plus`, `topk_margin`, `entropy` are the scores confidence, margin, entropy), RND1 (`even`, entropy), the
    `dllm` library (`rounded`, `cosine`). Blocks share the steps in proportion to their length. Under `rounded` and
    `cosine` each block gets the same number, rounded up. Each step commits at least one position, and a finished block
    takes no more steps. A cache that predicts only some of the masks (Elastic-Cache, d2Cache) does not change the
    shares. From the last step on each forward commits all that is predicted.

    Args:
        steps: forwards for the whole generation. By default one per token.
        score: statistic that ranks the masks. With entropy the lowest is first.
        schedule: `uniform` divides the block's masks evenly, the first steps taking one more. `even` spreads these
            steps: step k of n leaves masks * (1 - k/n), truncated. `timestep` commits the share 1 - s/t of the masks
            left, truncated. The times t before a step and s after it fall from 1 to `eps`. `rounded` commits that share
            for times that fall to 0, rounded to an integer, ties to even. It skips steps without a commit. `cosine` is
            `rounded` for times on a cosine: few tokens first.
        eps: time at which the timestep schedule ends.
        alg_temp: above 0, positions are drawn by softmax(score / alg_temp) instead of taken from the top.
    """

    steps: int | None = None
    score: Score = "confidence"
    schedule: Schedule = "uniform"
    eps: float = 1e-3
    alg_temp: float = 0.0

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)
        check_eps(self.eps)
        check_choice("scheduler.score", self.score, Score)
        check_choice("scheduler.schedule", self.schedule, Schedule)
        check_number("scheduler.alg_temp", self.alg_temp, finite=True)

    @property
    @override
    def traits(self) -> Traits:
        draws = self.score == "random" or self.alg_temp > 0
        return Traits(ranks_by_confidence=self.score == "confidence", draws_order=draws, scheduled=True)

    @property
    def total_steps(self) -> int | None:
        """The option `steps`, or None for a schedule that rounds up in each block and so keeps to no number."""
        return None if self.schedule in ROUNDED else self.steps

    @property
    @override
    def needs(self) -> frozenset[str]:
        return score_needs(self.score)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` masks and `[B]` steps of the block when it was opened, since a stop may shorten the canvas.

        In place of the masks a rounded schedule has the steps made or skipped so far.
        """
        return torch.zeros_like(canvas.start), torch.zeros_like(canvas.start)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        count, carry = self.count(canvas, carry)
        score = self.order(canvas, query, readout, count)
        return Edit(readout.token[:, 0], top(score, canvas.eligible(query.positions), count)), carry

    def count(self, canvas: Canvas, carry: Carry) -> tuple[Tensor, Carry]:
        """Return `[B]` positions that this step commits, and the next step's carry."""
        left = canvas.noise_left()  # on the canvas: a cache may choose which masks are queried
        if self.schedule in ROUNDED:
            opens = canvas.age == 0
            done = carry[0].masked_fill(opens, 0)
            steps = torch.where(opens, equal_steps(canvas, self.steps), carry[1])
            most = self.steps or canvas.layout.width
            count, done = rounded_share(left, steps, done, most, cosine=self.schedule == "cosine")
            return count, (done, steps)
        masks, steps = plan_block(canvas, self.steps, carry, left)
        return self.share(canvas, masks, steps, left), (masks, steps)

    def share(self, canvas: Canvas, masks: Tensor, steps: Tensor, left: Tensor) -> Tensor:
        """Return `[B]` positions that this step commits in a block of `masks [B]` with `left [B]` now."""
        if self.schedule == "uniform":
            count = uniform_share(masks, steps, canvas.age)
        elif self.schedule == "even":
            count = left - even_rest(masks, steps, canvas.age + 1)
        else:
            count = timestep_share(left, steps, canvas.age, self.eps)
        return torch.where(canvas.age + 1 >= steps, left, count.clamp(min=1))

    def order(self, canvas: Canvas, query: Query, readout: Readout, count: Tensor) -> Tensor:
        """Return `[B, Q]` the score that ranks the masks in this step: `rate`, with noise if `alg_temp` is set."""
        score = self.rate(canvas, query, readout)
        if not self.alg_temp:
            return score
        return score / self.alg_temp + canvas.layout.noise.order(canvas, query.positions, count)

    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """Return `[B, Q]` the score of the masks, higher first."""
        return rate(self.score, canvas, query, readout)

    @override
    def bound(self, tokens: int) -> int:
        return max(tokens, self.steps or 0)
