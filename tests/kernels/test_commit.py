"""The commit kernel against `select` and `Canvas.apply`: ties, fillers, finished rows, scores that are no numbers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import launches, select
from dllm_sampler.canvas import Edit, Query
from dllm_sampler.errors import FallbackWarning, UserError
from dllm_sampler.kernels import backend, commit, reference
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


@settings(max_examples=30, deadline=None)
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


def chosen_alike(score: torch.Tensor, eligible: torch.Tensor, wanted: torch.Tensor, count: torch.Tensor) -> None:
    """Kernel, reference and `select` with either."""
    led, counted = select.at_least_one(wanted, score, eligible), select.top(score, eligible, count)
    for it in (commit.choose, reference.choose):
        assert torch.equal(it(score, eligible, wanted=wanted), led)
        assert torch.equal(it(score, eligible, count=count), counted)
    with launches.by(commit):
        assert torch.equal(select.at_least_one(wanted, score, eligible), led)
        assert torch.equal(select.top(score, eligible, count), counted)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.tuples(SCORES, st.booleans(), st.booleans()), min_size=5, max_size=5), min_size=1, max_size=3),
    st.integers(0, 6),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_choosing_without_writing(rows: list, count: int, dtype: torch.dtype) -> None:
    score = torch.tensor([[score for score, _, _ in row] for row in rows], dtype=dtype)
    eligible, wanted = (torch.tensor([[item[i] for item in row] for row in rows]) for i in (1, 2))
    chosen_alike(score, eligible, wanted, torch.arange(count, count + len(rows)))


def test_tables_of_any_stride() -> None:
    score = torch.rand(7, 3, 2, generator=checks.seeded(0), dtype=torch.float64)[..., 0].T  # [3, 7]
    eligible = torch.tensor([[True], [False], [True]]).expand(3, 7)
    wanted = torch.rand(3, 14, generator=checks.seeded(1))[:, ::2] < 0.3
    chosen_alike(score, eligible, wanted, torch.tensor([2, 3, 0]))


def test_what_the_kernel_does_not_know_is_torchs() -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the kernel was asked")

    count = torch.ones(1, dtype=torch.long)
    with launches.by(SimpleNamespace(choose=never)):
        for score in (torch.rand(1, select.WIDEST + 1), torch.rand(1, 4).half()):
            assert int(select.top(score, torch.ones_like(score, dtype=torch.bool), count).sum()) == 1
        with pytest.raises(AssertionError, match="was asked"):
            select.top(torch.rand(1, 4), torch.ones(1, 4, dtype=torch.bool), count)


def test_a_kernel_that_cannot_run_is_torch_from_then_on() -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    score, all_of = torch.rand(2, 4), torch.ones(2, 4, dtype=torch.bool)
    expected = select.top(score, all_of, torch.tensor([1, 2]))
    with launches.by(SimpleNamespace(choose=backend.guarded(fails, reference.choose))):
        with pytest.warns(FallbackWarning, match="cannot run"):
            assert torch.equal(select.top(score, all_of, torch.tensor([1, 2])), expected)
        assert torch.equal(select.top(score, all_of, torch.tensor([1, 2])), expected)


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
