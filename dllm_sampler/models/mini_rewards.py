"""Scores of answers to mini's tasks: functions in TRL's form."""

from collections import Counter
from typing import Any

from dllm_sampler.models.mini_tasks import TASKS, UNSEEN, filled_share


def solved(task: str, prompt: str, answer: str, text: str) -> bool:
    """Return True if `text` is right for the prompt.

    Args:
        task: one of mini's tasks. A lesson is judged as the task that its prompt begins with. Empty for an example of a
            user's data.
        prompt: the prompt.
        answer: the right text, which counts if no task judges.
        text: the text to judge.
    """
    tasks = TASKS | UNSEEN
    found = tasks.get(task) or tasks.get(prompt.partition(":")[0]) if task else None
    return text == answer if found is None else found.check(prompt, text)


def correct(prompts: list[str], completions: list[str], task: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each completion that is `solved`, else 0."""
    return [float(solved(*each)) for each in zip(task, prompts, answer, completions, strict=True)]


def partly(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the share of characters that a text and the right answer have at the same place, out of the longer one."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, text, right)) / max(len(text), len(right), 1) for text, right in pairs]


def lines(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the share of a 4x4 latin square's rows and columns that contain 1 to 4.

    It is 0 for a text that is not the filled puzzle: four rows of four, with the given cells.
    """
    return [filled_share(*each, boxed=False) for each in zip(prompts, completions, strict=True)]


def units(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the share of a 4x4 sudoku's rows, columns and boxes that contain 1 to 4, or 0 as `lines` does."""
    return [filled_share(*each, boxed=True) for each in zip(prompts, completions, strict=True)]


def items(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the number of items that a list and the right answer share, divided by the length of the longer one."""
    lists = zip((text.split(", ") for text in completions), (right.split(", ") for right in answer), strict=True)
    pairs = [(Counter(one), Counter(other)) for one, other in lists]
    return [(one & other).total() / max(one.total(), other.total()) for one, other in pairs]
