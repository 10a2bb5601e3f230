"""Rewards in TRL's form: `reward(prompts, completions, **columns) -> list[float | None]`, and advantages from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.models.mini_tasks import TASKS, UNSEEN, boxes
from dllm_sampler.schedulers.rewards import listed

Reward = Callable[..., Sequence[float | None]]


def solved(task: str, prompt: str, answer: str, text: str) -> bool:
    """Whether `text` is right for the prompt; a lesson is judged as the task that its prompt names, or by `answer`.

    task: of mini's; empty: an example of a user's data, judged by `answer`
    """
    tasks = TASKS | UNSEEN
    found = tasks.get(task) or tasks.get(prompt.partition(":")[0]) if task else None
    return text == answer if found is None else found.check(prompt, text)


def correct(prompts: list[str], completions: list[str], task: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a right answer to one of mini's tasks, or for the very answer of a user's data; else 0."""
    return [float(solved(*each)) for each in zip(task, prompts, answer, completions, strict=True)]


def partly(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the characters that are those of the right answer at their place; of use where only one is right."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, right)) / max(len(text), len(right), 1) for text, right in pairs]


def lines(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of the eight rows and columns of a 4x4 latin square that hold 1 to 4 once each; 0 where a given differs."""
    return [_filled(*each, boxed=False) for each in zip(prompts, completions, strict=True)]


def units(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The same of a 4x4 sudoku, of its four boxes too."""
    return [_filled(*each, boxed=True) for each in zip(prompts, completions, strict=True)]


def _filled(prompt: str, text: str, *, boxed: bool) -> float:
    puzzle, rows = prompt.partition(": ")[2], text.split(", ")
    same = len(text) == len(puzzle) and all(given in ("_", cell) for given, cell in zip(puzzle, text, strict=True))
    if not same or [len(row) for row in rows] != [4] * 4:
        return 0.0
    found = [*rows, *("".join(column) for column in zip(*rows, strict=True)), *(boxes(rows) if boxed else ())]
    return sum(sorted(unit) == list("1234") for unit in found) / len(found)


def items(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of a list's items that are those of the right answer, in any order."""
    lists = zip((text.split(", ") for text in completions), (right.split(", ") for right in answer), strict=True)
    pairs = [(Counter(one), Counter(other)) for one, other in lists]
    return [(one & other).total() / max(one.total(), other.total()) for one, other in pairs]


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
