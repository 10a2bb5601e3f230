"""A step's bookkeeping in one launch each, against the same in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import bookkeeping as plain
from dllm_sampler.kernels import bookkeeping as fused
from tests.kernels import bookkeeping_checks as checks

SIZES = [(1, 1, 1), (1, 33, 32), (3, 7, 9), (5, 40, 12), (2, 1500, 1100)]


@pytest.mark.parametrize("size", SIZES)
def test_as_torch(size: tuple[int, int, int]) -> None:
    for seed in range(1 if size[1] > 1000 else 2):
        it = checks.Scene(*size, seed)
        but_commits(it)
        checks.notes(it, torch.float64)


def but_commits(it: checks.Scene) -> None:
    """Every launch but the one that chooses and commits, which takes longer than the others together: test_commit."""
    for part in (checks.blocks, checks.writes, checks.moves):
        part(it)
    checks.notes(it, torch.float32)


def test_more_rows_than_a_program_has() -> None:
    checks.moves(checks.Scene(1100, 3, 2, 0))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_any_scene(batch: int, columns: int, width: int, seed: int) -> None:
    but_commits(checks.Scene(batch, columns, width, seed))


def test_who_is_bad() -> None:
    """Said in numbers: any hypothesis counts, but only at noise that was asked about, and not of a row that is done."""
    nan, masked = torch.nan, torch.tensor([[True, True, False, True, False]]).repeat(5, 1)
    confidence = torch.full((5, 2, 3), 0.5, dtype=torch.float64)
    for row, candidate, place in ((0, 1, 1), (1, 1, 2), (2, 0, 0), (3, 1, 0), (4, 0, 2)):
        confidence[row, candidate, place] = nan
    positions = torch.tensor([[0, 1, 2]]).repeat(5, 1)  # the last of which is no noise
    block = torch.zeros(5, dtype=torch.long), torch.tensor([4, 4, 4, 4, 3])
    done, step = torch.tensor([False, False, True, False, False]), torch.arange(10, 15)
    bad, commit = torch.tensor([0, 0, 0, 3, 0]), torch.ones(5, 3, dtype=torch.bool)
    for it in (plain, fused):
        found, may = it.vouch(masked, positions, *block, done, step, bad, confidence, commit, positions)
        assert found.tolist() == [11, 0, 0, 3, 0]
        assert may.any(1).tolist() == may.all(1).tolist() == [False, True, True, False, True]


def test_the_least_noise_comes_first() -> None:
    """Said in numbers: a block of five, noise at three of its columns, asked for two and for four."""
    ids, masked = torch.arange(10)[None] * 10, torch.zeros(1, 10, dtype=torch.bool)
    masked[0, [1, 3, 4, 6, 8]] = True
    block = torch.tensor([2]), torch.tensor([7])
    for it in (plain, fused):
        assert it.noise(ids, masked, *block, 2)[0].tolist() == [[3, 4]]
        positions, tokens = it.noise(ids, masked, *block, 4)
        assert positions.tolist() == [[3, 4, 6, 9]] and tokens.tolist() == [[30, 40, 60, 90]]
        assert it.noise_left(masked, *block).tolist() == [3]
