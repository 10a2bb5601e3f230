"""The kernels that choose and commit against torch: ties, fillers, finished rows, scores that are no numbers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import bookkeeping, launches, select
from dllm_sampler.canvas import Choice, Edit, Query
from dllm_sampler.errors import FallbackWarning, UserError
from dllm_sampler.kernels import backend, commit, reference
from tests import toys
from tests.kernels import bookkeeping_checks as scenes
from tests.kernels import readout_checks as checks

SCORES = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.9, 1 - 1e-12, 1.0, math.inf, math.nan])


@pytest.mark.parametrize("size", [(1, 1, 1), (4, 9, 7), (2, 40, 33), (1, 1023, 32), (2, 1024, 130), (1, 2100, 512)])
def test_a_commit_as_torch(size: tuple[int, int, int]) -> None:
    for seed in range(1 if size[1] > 1000 else 2):
        scenes.commits(scenes.Scene(*size, seed))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_a_commit_in_any_scene(batch: int, columns: int, width: int, seed: int) -> None:
    scenes.commits(scenes.Scene(batch, columns, width, seed))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(SCORES, st.booleans(), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 10),
    SCORES.filter(lambda threshold: not math.isnan(threshold)),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_a_commit_by_any_score(
    positions: list[tuple[float, bool, bool]], count: int, threshold: float, dtype: torch.dtype
) -> None:
    """By every rule; each position has a score, may be noise and may be wanted."""
    width = len(positions)
    score, masked, wanted = (torch.tensor([[item[i] for item in positions]]) for i in range(3))
    masked, at, zero = torch.nn.functional.pad(masked, (0, 1)), torch.arange(width)[None], torch.zeros(1).long()
    sure, block = torch.ones(1, 1, width, dtype=torch.float64), (zero, zero + width)
    ids = torch.zeros(1, width + 1, dtype=torch.long)
    given = ids, masked, ~masked, at, *block, zero > 0, zero, zero, sure, at + 1, score.to(dtype)
    for rule in ({"threshold": threshold}, {"wanted": wanted}, {"count": torch.tensor([count])}):
        scenes.alike("commit", *given, **rule)


def test_what_is_committed() -> None:
    """Said in numbers: two of each row, the lower position among equals, unless row, column or token forbid it."""
    masked, frozen = torch.ones(6, 6, dtype=torch.bool), torch.zeros(6, 6, dtype=torch.bool)
    masked[:, [0, -1]], frozen[:, [0, -1]] = False, True
    frozen[1, 2] = True  # which noise never is
    positions = torch.tensor([[1, 2, 3, 4, 5]]).repeat(6, 1)  # the last one is a filler
    start, stop = torch.full((6,), 1), torch.tensor([5, 5, 5, 5, 5, 3])
    done, bad = torch.tensor([0, 0, 1, 0, 0, 0]) > 0, torch.tensor([0, 0, 0, 3, 0, 0])
    confidence = torch.full((6, 2, 5), 0.5, dtype=torch.float64)
    confidence[4, 1, 3] = math.nan  # under its second hypothesis
    score = torch.tensor([[0.1, 0.7, 0.7, 0.7, 0.9]]).repeat(6, 1).double()
    ids, token = torch.zeros(6, 6, dtype=torch.long), positions * 10
    given = ids, masked, frozen, positions, start, stop, done, torch.full((6,), 8), bad, confidence, token, score
    for it in (bookkeeping.commit, commit.commit):
        failed, committed, new, noise = it(*given, count=torch.full((6,), 2), forbidden=30)
        assert failed.tolist() == [0, 0, 0, 3, 9, 0]
        assert [row.nonzero()[:, 0].tolist() for row in committed] == [[1], [1], [1], [], [], [0, 1]]
        assert new.sum(1).tolist() == [20, 0, 0, 0, 0, 30] and new[5].tolist() == [0, 10, 20, 0, 0, 0]
        assert torch.equal(noise, masked & (new == 0))


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


@pytest.mark.parametrize("rule", ["threshold", "wanted", "count"])
@pytest.mark.parametrize("forbidden", [None, 7])
def test_a_canvas_commits_in_one_launch(rule: str, forbidden: int | None) -> None:
    """What torch does in parts; strided tables as a readout with K = 2 has them."""
    masked = torch.rand(4, 12, generator=checks.seeded(0)) < 0.7
    canvas = toys.canvas(masked, done=torch.tensor([False, False, True, False]))
    at = Query.masks(canvas, 8).positions
    sure = torch.rand(4, 2, 8, generator=checks.seeded(1), dtype=torch.float64)
    sure[1, 1, 0] = math.nan
    token = torch.randint(30, (4, 2, 8), generator=checks.seeded(2))[:, 0]
    rules: dict[str, Any] = {"threshold": 0.8, "wanted": sure[:, 0] < 0.3, "count": torch.tensor([1, 2, 3, 0])}
    choice, bad = Choice(canvas, at, sure[:, 0], **{rule: rules[rule]}), torch.zeros(4, dtype=torch.long)
    expected, parts = canvas.commit(at, Edit(token, choice.made()), bad, sure, forbidden)
    with launches.by(SimpleNamespace(commit=commit.commit)):
        found, told = canvas.commit(at, Edit(token, choice), bad, sure, forbidden)
    with launches.by(SimpleNamespace(write=None)):  # not a launch more
        after = canvas.apply(at, told)
    assert torch.equal(found, expected) and torch.equal(told.commit, parts.commit)
    theirs = canvas.apply(at, parts)
    assert torch.equal(after.ids, theirs.ids) and torch.equal(after.masked, theirs.masked)


def test_one_rule_is_needed() -> None:
    score, all_of = torch.rand(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for kernel in (commit.choose, reference.choose):
        for rule in ({}, {"wanted": all_of, "count": torch.ones(1, dtype=torch.long)}):
            with pytest.raises(UserError, match="wanted or a count"):
                kernel(score, all_of, **rule)
