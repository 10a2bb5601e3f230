"""Rewards: how they add up, what becomes of one that fails, and where they are found."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from dllm_sampler.models.mini_rewards import solved
from dllm_sampler.training import rewards
from tests.refusals import refused


def broken(**_: Any) -> list[float]:
    raise RuntimeError("no judge")


def nowhere(completions: list[str], **_: Any) -> list[float]:
    return [math.nan] * len(completions)


def by_length(completions: list[str], **_: Any) -> list[float | None]:
    return [None if not text else float(len(text)) for text in completions]


def judge(*functions: Any, completions: list[str] | None = None) -> rewards.Scores:
    texts = completions or ["a", "bb", ""]
    named = {f"r{i}": (function, 2.0) for i, function in enumerate(functions)}
    return rewards.judge(named, ["p"] * len(texts), texts, {"answer": ["x"] * len(texts)})


def test_rewards_add_up() -> None:
    scores = judge(by_length, lambda prompts, completions, **_: [1.0] * len(prompts))
    assert scores.total.tolist() == [4, 6, 2], "None adds nothing"
    assert scores.means == {"r0": 1.5, "r1": 1.0}
    assert not scores.troubles
    assert judge(by_length).total.isnan().tolist() == [False, False, True], "no function judged the last"


@pytest.mark.parametrize(
    ("reward", "message", "unscored"),
    [
        (broken, r"reward r0 failed on 3 answers \(RuntimeError: no judge\)", 3),
        (lambda **_: [1.0], "gave 1 numbers for 3 answers", 3),
        (lambda **_: [1.0, math.nan, math.inf], "not finite for 2 answers", 2),
        (lambda **_: ["high"] * 3, "failed on 3 answers .ValueError", 3),
    ],
)
def test_rewards_that_fail_say_so(reward: Any, message: str, unscored: int) -> None:
    scores = judge(reward, lambda **_: [1.0] * 3)
    assert int(scores.total.isnan().sum()) == unscored
    assert len(scores.troubles) == 1
    assert re.search(message, scores.troubles[0])


def test_finding_rewards() -> None:
    assert rewards.find("correct") is rewards.correct
    assert rewards.find(f"{__name__}:broken") is broken
    for name, message in (
        ("corect", "choice-unknown: 'correct'"),
        ("no.such:f", "function-missing"),
        ("math:pi", "function-invalid"),
    ):
        with refused(message):
            rewards.find(name)
    assert rewards.correct(["copy: Ada"], ["Ada"], task=["copy"], answer=["Ada"]) == [1.0]
    assert rewards.items(["p"] * 2, ["Ada, Ben, Ada", ""], answer=["Ben, Ada, Cal, Dan", "Ada"]) == [0.5, 0]
    puzzle, right = "latin: 1_3_, _3_1, 2___, _41_", "1234, 4321, 2143, 3412"
    found = [right, right.replace("3412", "3411"), right.replace("1234", "2134"), "1234, 4321", right + "1", ""]
    assert rewards.lines([puzzle] * 6, found) == [1, 6 / 8, 0, 0, 0, 0]
    assert rewards.units([puzzle] * 3, found[:3]) == [1, 9 / 12, 0]
    open_puzzle, square = "latin: 1___, ____, ____, ____", "1234, 2341, 3412, 4123"
    assert rewards.units([open_puzzle], [square]) == [8 / 12], "no box of it is right"
    assert solved("latin", open_puzzle, "", square) and not solved("sudoku", open_puzzle, "", square)
    assert rewards.partly(["p"], ["12x4"], answer=["1234"]) == [0.75]
