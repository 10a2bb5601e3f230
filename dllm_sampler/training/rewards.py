"""Rewards in TRL's form: `reward(prompts, completions, **columns) -> list[float | None]`, and their weighted sum."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.errors import UserError, counted, unknown
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.inputs.rewards import listed
from dllm_sampler.models.mini_rewards import correct, items, lines, partly, units

Reward = Callable[..., Sequence[float | None]]
Scores = tuple[Tensor, dict[str, float], list[str]]  # weighted sums [N], mean of each reward, sentences for the log
Functions = str | Reward | Sequence[str | Reward]
REWARDS: dict[str, Reward] = {"correct": correct, "partly": partly, "lines": lines, "units": units, "items": items}


def find(name: str) -> Reward:
    """Return a reward by its name, or by `package.module:function`."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise unknown("reward", name, [*REWARDS, "package.module:function"])
    return resolve_callable("the reward ", name)


def call(name: str, reward: Reward, prompts: Sequence[Any], completions: list[str], columns: Mapping[str, Any]) -> Any:
    """Return a reward's values of N completions: a number each, or None where it does not apply."""
    try:
        given = listed(reward(prompts=prompts, completions=completions, **columns))
        values = [None if one is None else float(one) for one in given]
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        said = f"reward {name} failed on {counted(len(completions), 'answer')} ({type(error).__name__}: {error})."
        said += " Correct it: it is called as reward(prompts=..., completions=..., **columns)."
        raise UserError("function-failed", said) from error
    if len(values) != len(completions):
        said = f"reward {name} returned {counted(len(values), 'number')} for {counted(len(completions), 'answer')}."
        raise UserError("function-result", f"{said} Return a number or None for each answer.")
    return values


def judge(
    rewards: Mapping[str, tuple[Reward, float]], prompts: Sequence[Any], completions: list[str], columns: Any
) -> Scores:
    """Return weighted sums `[N]` of the rewards, the mean of each reward, and sentences for the log.

    A sum is NaN if a reward fails or is not finite, or if none applies. A reward that is None adds nothing.
    """
    total = torch.zeros(len(completions), dtype=torch.float64)
    judged = torch.zeros(len(completions), dtype=torch.bool)
    means, troubles = {}, []
    for name, (reward, weight) in rewards.items():
        try:
            given = call(name, reward, prompts, completions, columns)
        except UserError as error:
            troubles.append(f"{error} No answer of this batch has a score.")
            total.fill_(torch.nan)
            continue
        applies = torch.tensor([one is not None for one in given], dtype=torch.bool)
        values = torch.tensor([one or 0.0 for one in given], dtype=torch.float64)
        bad = applies & ~values.isfinite()
        if bad.any():
            troubles.append(f"reward {name} is not finite: {counted(int(bad.sum()), 'answer')} without a score.")
        total += weight * torch.where(bad, torch.nan, values)
        judged |= applies
        means[name] = float(values[applies & ~bad].mean())  # NaN where it judged none
    return torch.where(judged, total, torch.nan), means, troubles
