"""Rewards, and the policy-gradient loss and its figures by hand."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler.models.mini_rewards import solved
from dllm_sampler.training import policy, rewards
from dllm_sampler.training.masked import Chunk
from dllm_sampler.training.policy import Goal
from tests.refusals import refused


def logs(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64).log()


def chunk(rows: int, columns: int) -> Chunk:
    """All tokens of some rows."""
    nothing = torch.zeros(rows, columns, dtype=torch.long)
    every = torch.arange(columns).expand(rows, -1)
    there = torch.ones(rows, columns, dtype=torch.bool)
    return Chunk(torch.arange(rows), every, there, nothing, nothing, every, there, every, 0)


@pytest.mark.parametrize(
    ("advantage", "old", "new", "loss", "slope", "clipped"),
    [
        (1.0, 0.5, 0.7, -1.2, 0.0, 1.0),  # 1.4 times as likely: a good token gains no more
        (1.0, 0.5, 0.55, -1.1, -1.1, 0.0),
        (1.0, 0.5, 0.25, -0.5, -0.5, 0.0),  # a good token may always come back
        (-1.0, 0.5, 0.7, 1.4, 1.4, 0.0),  # and a bad one may always go
        (-1.0, 0.5, 0.25, 0.8, 0.0, 1.0),  # half as likely: a bad token loses no more
        (-2.0, 0.5, 0.45, 1.8, 1.8, 0.0),
    ],
)
def test_clipping_by_hand(advantage: float, old: float, new: float, loss: float, slope: float, clipped: float) -> None:
    """min(r A, clip(r) A) with r = new / old and epsilon 0.2; its slope in the log-probability is r A, or 0."""
    now = logs(new).view(1, 1).requires_grad_()
    goal = Goal(torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1), logs(old).view(1, 1), None)
    found, figures = goal.loss(chunk(1, 1), now, 0.2, 0.0)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss)
    assert now.grad is not None and float(now.grad) == pytest.approx(slope)
    assert figures == {"clipped": clipped}


def test_divergence_by_hand() -> None:
    """exp(d) - d - 1 with d = log ref - log pi: 0.5 + log 2 - 1 and 2 - log 2 - 1; slopes 1 - exp(d)."""
    now = logs(0.7, 0.2).view(1, 2).requires_grad_()
    weight, reference = torch.tensor([[0.25, 0.75]], dtype=torch.float64), logs(0.35, 0.4).view(1, 2)
    goal = Goal(torch.zeros(1, dtype=torch.float64), weight, None, reference)
    found, figures = goal.loss(chunk(1, 2), now, 0.2, 0.5)
    found.backward()
    kl = 0.25 * (math.log(2) - 0.5) + 0.75 * (1 - math.log(2))
    assert figures["kl"] == pytest.approx(kl) and float(found.detach()) == pytest.approx(0.5 * kl)
    assert now.grad is not None and now.grad[0].tolist() == pytest.approx([0.5 * 0.25 * 0.5, 0.5 * 0.75 * -1])


def test_importance_ratios_by_hand() -> None:
    sampled, learner = logs(0.5, 0.25, 0.9), logs(0.25, 0.5, 0.1)
    found = policy.mismatch(sampled, learner, torch.tensor([True, True, False]))
    assert (found["ratio"], found["ratio_least"], found["ratio_most"]) == pytest.approx((1.25, 0.5, 2))
    assert found["ratio_log"] == pytest.approx(math.log(2))
    assert found["ratio_kl"] == pytest.approx(((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))) / 2)
    assert policy.mismatch(sampled, learner, torch.zeros(3, dtype=torch.bool)) == {}


def test_distinct_answers_by_hand() -> None:
    """Of answers up to the end token: what stands behind it makes no difference."""
    tokens = torch.tensor([[5, 6, 9, 1], [5, 6, 9, 2], [5, 6, 7, 9], [5, 6, 9, 1], [8, 9, 1, 1], [8, 9, 2, 2]])
    result: Any = SimpleNamespace(tokens=tokens, lengths=torch.tensor([3, 3, 4, 3, 2, 2]))
    assert policy.distinct(result, 3) == pytest.approx(2 / 3)
    assert policy.distinct(result, 2) == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)


def test_advantages_by_hand() -> None:
    nan = math.nan
    scores = torch.tensor([1.0, 0, 0, 0.1, 0.1, 0.1, 2, nan, 4, nan, nan, nan], dtype=torch.float64)
    found = policy.advantages(scores, 3, scale=False)
    assert found.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0, -1, 0, 1, 0, 0, 0])
    scaled = policy.advantages(scores, 3, scale=True)
    assert scaled[3:6].tolist() == [0, 0, 0], "equal rewards stay nothing to learn from"
    assert float(scaled[6]) == pytest.approx(-1 / (2**0.5 + 1e-4))


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
    assert scores[0].tolist() == [4, 6, 2], "None adds nothing"
    assert scores[1] == {"r0": 1.5, "r1": 1.0}
    assert not scores[2]
    assert judge(by_length)[0].isnan().tolist() == [False, False, True], "no function judged the last"


@pytest.mark.parametrize(
    ("reward", "message", "unscored"),
    [
        (broken, r"reward r0 failed on 3 answers \(RuntimeError: no judge\)", 3),
        (lambda **_: [1.0], "returned 1 number for 3 answers", 3),
        (lambda **_: [1.0, math.nan, math.inf], "not finite: 2 answers", 2),
        (lambda **_: ["high"] * 3, "failed on 3 answers .ValueError", 3),
    ],
)
def test_rewards_that_fail_say_so(reward: Any, message: str, unscored: int) -> None:
    total, _, troubles = judge(reward, lambda **_: [1.0] * 3)
    assert int(total.isnan().sum()) == unscored
    assert len(troubles) == 1
    assert re.search(message, troubles[0])


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
