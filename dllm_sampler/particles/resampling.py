"""The common part of particles with several rows: their conditions, and the draw of ancestors."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import PARTICLES, gumbel, hashed, unit
from dllm_sampler.core.protocols import Context, Meeting, Particles, is_random
from dllm_sampler.core.select import arange
from dllm_sampler.core.spec import BatchState
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import NOTHING, Reward
from dllm_sampler.options import MOST_ROWS

LOWEST = -1e30  # in place of the reward -inf, so that differences are numbers
DRAWS = 2  # number of a meeting's draws, beside those of seeds


@dataclass(frozen=True)
class SeveralRows(Particles):
    """The base of particles with several rows for each prompt.

    Args:
        count: rows of each prompt.
    """

    count: int = 4

    def __post_init__(self) -> None:
        check_count("particles.count", self.count, most=MOST_ROWS)

    @override
    def bind(self, context: Context) -> Self:
        if self.count == 1:
            return self
        scheduler, name = context.scheduler, f"particles={named(self)}"
        assert scheduler is not None
        if not is_random(context.guides) and not scheduler.traits.draws_order:
            raise UserError(
                "candidates-identical",
                f"{name} compares rows of one prompt, which are identical because decoding is greedy. Set a"
                " temperature, for example temperature=1.",
            )
        if self.meets and scheduler.traits.has(BatchState):
            raise UserError(
                "particles-incompatible",
                f"{name} copies rows, and scheduler={named(scheduler)} keeps numbers for the batch as a whole. Use"
                " particles=best_of_n.",
            )
        if self.meets and self.every is None and context.blocks.slides:
            raise UserError(
                "particles-incompatible",
                f"{name} compares rows when blocks end, and blocks={named(context.blocks)} has a sliding window. Use"
                " particles=best_of_n, or particles=steering with particles.every.",
            )
        if self.meets and context.spec.encoder:
            raise UserError(
                "particles-incompatible",
                f"{name} copies rows, and the state of this model's encoder is not stored row by row. Use"
                " particles=best_of_n.",
            )
        return self


@dataclass(frozen=True)
class Resampling(SeveralRows):
    """The base of particles whose rows are resampled at meetings, in proportion to their weights.

    Args:
        ess: rows are resampled if their effective number is below this share of `count`. With None they are resampled
            at every meeting.
    """

    meets: ClassVar[bool] = True

    ess: float | None = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("particles.ess", self.ess, "a share", most=1, optional=True)

    def ancestors(self, meeting: Meeting, log_weights: Tensor) -> Tensor:
        """Return `[G, N] int64` ancestors for `log_weights [G, N]`. They are -1 in prompts that are not resampled."""
        weights = self.weights(log_weights, meeting.stuck)
        again = meeting.here
        if self.ess is not None:
            again = again & (1 / weights.square().sum(1) < self.ess * self.count)
        return self.draw(meeting, weights, again).masked_fill(~again[:, None], -1)

    def weights(self, log_weights: Tensor, stuck: Tensor) -> Tensor:
        """Return `[G, N]` weights that sum to 1. Rows that a guide has ended get 0, unless all rows have ended."""
        log_weights = torch.where(stuck & ~stuck.all(1, keepdim=True), -torch.inf, log_weights)
        return log_weights.softmax(1)

    def draw(self, meeting: Meeting, weights: Tensor, again: Tensor) -> Tensor:
        """Return `[G, N] int64` rows drawn by `weights [G, N]`. Only those of prompts in `again [G] bool` are used."""
        seeds, count = meeting.canvas.layout.seeds.view(-1, self.count)[:, 0], self.count
        keys = hashed(seeds, torch.full_like(seeds, DRAWS), arange(count * count, seeds.device)[None], PARTICLES)
        return (weights.log()[:, None] + gumbel(unit(keys)).view(-1, count, count)).argmax(2)


def judge_of(given: Any, name: str, context: Context) -> Reward:
    """Return the reward for the option `particles.reward`, a function or `package.module:function`."""
    if given is None:
        raise UserError("option-missing", f"{name} needs a reward. Set particles.reward=package.module:function.")
    return Reward.of(given, "particles.reward", context.tokenizer, context.spec.eos_ids)


def rewards(judge: Reward, meeting: Meeting, filled: Tensor | None = None) -> Tensor:
    """Return `[G * N, F] float64` rewards of the answers so far, with `filled` in place of masks.

    Args:
        filled: `[G * N, F, L+1]` tokens for masks. Masks with `NOTHING` are left out. None leaves out all (F = 1).
    """
    canvas, judged = meeting.canvas, meeting.here.repeat_interleave(meeting.log_p.shape[1])
    ids = torch.where(canvas.masked[:, None], NOTHING if filled is None else filled, canvas.ids[:, None])
    return judge(canvas, ids, judged).clamp(min=LOWEST)
