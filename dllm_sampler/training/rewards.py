"""Rewards in TRL's form: `reward(prompts, completions, **columns) -> list[float | None]`, and advantages from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.models.mini_rewards import correct, items, lines, partly, units
from dllm_sampler.schedulers.rewards import listed

Reward = Callable[..., Sequence[float | None]]


REWARDS: dict[str, Reward] = {"correct": correct, "partly": partly, "lines": lines, "units": units, "items": items}


def find(name: str) -> Reward:
    """A reward by its name, or by `package.module:function`.

    Raises:
        UserError: there is none.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise unknown("reward", name, [*REWARDS, "package.module:function"])
    return resolve_callable("the reward", name)


@dataclass(frozen=True)
class Scores:
    """What rewards said of a batch."""

    total: Tensor  # [N] float64 weighted sum; NaN where a sample has no score
    means: dict[str, float]  # of each reward over the samples that it judged
    troubles: list[str]  # sentences for the log


def check(
    rewards: Mapping[str, tuple[Reward, float]],
    prompts: Sequence[Any],
    completions: list[str],
    columns: Mapping[str, list[Any]],
) -> None:
    """Try the rewards on a few right answers, before anything is learned.

    Raises:
        UserError: one raises, or gives something else than a number or None for each answer.
    """
    for name, (reward, _) in rewards.items():
        try:
            given = listed(reward(prompts=prompts, completions=completions, **columns))
            for one in given:
                float(0 if one is None else one)
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            raise UserError(
                "function-failed",
                f"reward {name} failed on {len(completions)} right answers ({type(error).__name__}: {error}): it is"
                " called as reward(prompts=..., completions=..., **columns) and returns a number or None for each",
            ) from error
        if len(given) != len(completions):
            raise UserError(
                "function-result", f"reward {name} gave {len(given)} numbers for {len(completions)} answers"
            )


def judge(
    rewards: Mapping[str, tuple[Reward, float]],
    prompts: Sequence[Any],
    completions: list[str],
    columns: Mapping[str, list[Any]],
) -> Scores:
    """Weighted sum of the rewards of N completions.

    `None` means that a reward does not apply to a sample, and adds nothing. A sample has no score where a reward
    raises, returns something else than one number each, or a number that is not finite, or where none applies.
    """
    total = torch.zeros(len(completions), dtype=torch.float64)
    judged = torch.zeros(len(completions), dtype=torch.bool)
    means, troubles = {}, []
    for name, (reward, weight) in rewards.items():
        try:
            given = listed(reward(prompts=prompts, completions=completions, **columns))
            values = torch.tensor([0.0 if one is None else float(one) for one in given], dtype=torch.float64)
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            troubles.append(f"reward {name} failed ({type(error).__name__}: {error}): the batch has no score")
            total.fill_(torch.nan)
            continue
        if len(given) != len(completions):
            troubles.append(f"reward {name} gave {len(given)} numbers for {len(completions)} answers: no score")
            total.fill_(torch.nan)
            continue
        applies = torch.tensor([one is not None for one in given], dtype=torch.bool)
        bad = applies & ~values.isfinite()
        if bad.any():
            troubles.append(f"reward {name} is not finite for {int(bad.sum())} answers: these have no score")
        total += weight * torch.where(bad, torch.nan, values)
        judged |= applies
        good = values[applies & ~bad]
        means[name] = float(good.mean()) if len(good) else math.nan
    return Scores(torch.where(judged, total, torch.nan), means, troubles)
