"""The commit kernel against `select` and `Canvas.apply`: ties, fillers, finished rows, scores that are no numbers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import select
from dllm_sampler.canvas import Edit, Query
from dllm_sampler.errors import UserError
from dllm_sampler.kernels import commit, reference
from tests import toys
from tests.kernels import readout_checks as checks

KERNELS = pytest.mark.parametrize("kernel", [commit.commit, reference.commit], ids=["triton", "torch"])
SCORES = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.9, 1 - 1e-12, 1.0, math.inf, math.nan])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rows", "width", "length"), [(1, 1, 1), (5, 7, 9), (4, 33, 40), (2, 130, 200)])
def test_as_select(dtype: torch.dtype, rows: int, width: int, length: int) -> None:
    for seed in range(3):
        problem = checks.commit_problem(rows, width, length, seed, dtype)
        checks.commit_like_select(commit.commit, "cpu", **problem, threshold=0.6)
        count = torch.randint(0, width + 2, (rows,), generator=checks.seeded(seed))
        checks.commit_like_select(commit.commit, "cpu", **problem, count=count)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=9), st.integers(0, 10), SCORES)
def test_any_score(positions: list[tuple[float, bool]], count: int, threshold: float) -> None:
    width = len(positions)
    problem = {
        "ids": torch.zeros(1, width + 1, dtype=torch.long),
        "masked": torch.ones(1, width + 1, dtype=torch.bool),
        "positions": torch.arange(width)[None],
        "token": torch.arange(1, width + 1)[None],
        "score": torch.tensor([[score for score, _ in positions]], dtype=torch.float64),
        "eligible": torch.tensor([[may for _, may in positions]]),
        "done": torch.zeros(1, dtype=torch.bool),
    }
    checks.commit_like_select(commit.commit, "cpu", **problem, count=torch.tensor([count]))
    if not math.isnan(threshold):
        checks.commit_like_select(commit.commit, "cpu", **problem, threshold=threshold)


@KERNELS
def test_the_canvas_is_that_of_apply(kernel: Any) -> None:
    """The loop's own way: select, Edit, apply; strided tables as a readout with K = 2 has them."""
    masked = torch.rand(4, 12, generator=checks.seeded(0)) < 0.7
    canvas = toys.canvas(masked, done=torch.tensor([False, False, True, False]))
    query = Query.masks(canvas, 8)
    score = torch.rand(4, 2, 8, generator=checks.seeded(1), dtype=torch.float64)
    token = torch.randint(30, (4, 2, 8), generator=checks.seeded(2))
    eligible = canvas.eligible(query.positions)
    chosen = select.at_least_one(score[:, 0] >= 0.8, score[:, 0], eligible)
    after = canvas.apply(query.positions, Edit(token[:, 0], chosen))
    ids, noise = canvas.ids.clone(), canvas.masked.clone()
    found = kernel(ids, noise, query.positions, token[:, 0], score[:, 0], eligible, canvas.done, threshold=0.8)
    assert torch.equal(ids, after.ids) and torch.equal(noise, after.masked)
    assert torch.equal(found, chosen & ~canvas.done[:, None])


@KERNELS
def test_one_rule_is_needed(kernel: Any) -> None:
    tables = list(checks.commit_problem(1, 2, 3, 0).values())
    for rule in ({}, {"threshold": 0.5, "count": torch.ones(1, dtype=torch.long)}):
        with pytest.raises(UserError, match="threshold or a count"):
            kernel(*tables, **rule)
