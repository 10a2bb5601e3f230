"""The policy-gradient loss by hand, and the figures that tell whether a policy stays healthy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler.training import policy
from dllm_sampler.training.chunk import Chunk
from dllm_sampler.training.policy import Goal


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
