"""A step's bookkeeping in one launch each, against the same in torch: every number, and nothing else written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler import bookkeeping as plain
from dllm_sampler import select
from dllm_sampler.kernels import bookkeeping as fused
from tests.kernels.readout_checks import seeded


def shuffled(table: Tensor) -> Tensor:
    """The same numbers at strides of their own: a row is a part of a longer one."""
    wide = torch.zeros(table.shape[0], table.shape[1] + 3, dtype=table.dtype)
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]]


class Scene:
    """A canvas with everything that may stand in one: rows at different places, done, bad, cut, without noise."""

    def __init__(self, batch: int, columns: int, width: int, seed: int):
        of = seeded(seed)

        def below(most: int, *shape: int) -> Tensor:
            return torch.randint(most, shape, generator=of)

        def chance(share: float, *shape: int) -> Tensor:
            return torch.rand(shape, generator=of) < share

        size = columns + 1
        self.ids = shuffled(below(90, batch, size))
        self.begin = below(3, batch).clamp(max=columns - 1)
        self.frozen = (torch.arange(size) < self.begin[:, None] + 2) | chance(0.1, batch, size)
        self.frozen[:, -1] = True
        self.masked = shuffled(chance(0.6, batch, size) & ~self.frozen)
        self.start = self.begin + below(columns, batch).minimum(columns - 1 - self.begin)
        self.end = (self.start + 1 + below(columns, batch)).clamp(max=columns)
        self.stop = torch.minimum(self.start + 1 + below(columns, batch), self.end)
        self.age, self.step = below(5, batch), below(50, batch)
        self.done, self.bad = chance(0.3, batch), below(50, batch) * chance(0.3, batch)
        asked = torch.rand(batch, size - 1, generator=of).argsort(1)[:, :width].sort(1).values
        self.positions = torch.full((batch, width), columns)  # short of columns, fillers stand at the empty slot
        self.positions[:, : asked.shape[1]] = asked
        self.positions[:, -1] = columns
        self.token = shuffled(below(90, batch, width))
        self.commit, self.remask = chance(0.5, batch, width), chance(0.2, batch, width)
        self.remask &= ~self.commit
        self.confidence = torch.rand(batch, 2, width, generator=of, dtype=torch.float64)
        self.confidence[chance(0.05, batch, 2, width)] = torch.nan
        self.closed, self.finish = chance(0.5, batch), chance(0.3, batch)

    def named(self, *names: str) -> list[Any]:
        return [getattr(self, name) for name in names]


def alike(name: str, *given: Any, **named: Any) -> None:
    """Both return the same."""
    theirs = getattr(plain, name)(*given, **named)
    ours = getattr(fused, name)(*given, **named)
    for own, other in zip(*(one if isinstance(one, tuple) else (one,) for one in (ours, theirs)), strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        assert torch.equal(own, other), name


SIZES = [(1, 1, 1), (1, 33, 32), (3, 7, 9), (5, 40, 12), (2, 1500, 1100)]


def scenes(batch: int, columns: int, width: int) -> list[Scene]:
    return [Scene(batch, columns, width, seed) for seed in range(1 if columns > 1000 else 4)]


@pytest.mark.parametrize("size", SIZES)
def test_a_row_and_its_block(size: tuple[int, int, int]) -> None:
    for it in scenes(*size):
        alike("eligible", *it.named("masked", "positions", "start", "stop"))
        alike("noise_left", *it.named("masked", "start", "stop"))
        for width in {1, size[2], size[2] + 5}:
            alike("noise", *it.named("ids", "masked", "start", "stop"), width)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_and_who_is_bad(size: tuple[int, int, int]) -> None:
    for it in scenes(*size):
        table = it.named("ids", "masked", "frozen", "done", "positions", "token", "commit")
        before = [one.clone() for one in table]
        alike("write", *table)
        alike("write", *table, it.remask)
        for own, other in zip(table, before, strict=True):
            assert torch.equal(own, other)
        names = ("masked", "positions", "start", "stop", "done", "step", "bad", "confidence", "commit", "token")
        alike("vouch", *it.named(*names))
        alike("vouch", *it.named(*names), 7)
        alike("vouch", *it.named(*names[:7]), it.confidence[:, :1].float(), it.commit, it.token, 7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precise", [torch.float32, torch.float64])
def test_what_is_taken_down(size: tuple[int, int, int], precise: torch.dtype) -> None:
    for it in scenes(*size):
        after = plain.write(*it.named("ids", "masked", "frozen", "done", "positions", "token", "commit"))[1]
        sure = it.confidence[:, 1].nan_to_num(0.5)
        wrote = it.commit & (it.positions < size[1])
        for known, entropy in ((None, False), (None, True), (wrote, True)):
            found = []
            for note in (plain.note, fused.note):
                step_map = torch.full_like(it.ids, -1, memory_format=torch.contiguous_format)
                logprob, spread = torch.zeros(2, *it.ids.shape, dtype=precise)
                rest = it.positions, known, it.commit, it.masked, after, it.step, sure
                note(step_map, logprob, spread if entropy else None, *rest, it.confidence[:, 0] if entropy else None)
                found.append([table[:, :-1] for table in (step_map, logprob, spread)])  # nobody reads the empty slot's
            ours, theirs = found[1], found[0]
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[2].nan_to_num(9.0), theirs[2].nan_to_num(9.0))
            torch.testing.assert_close(ours[1], theirs[1], rtol=torch.finfo(precise).eps, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_moving_on_and_reporting(size: tuple[int, int, int]) -> None:
    for it in scenes(*size):
        rows = it.named("start", "stop", "begin", "end", "age", "step", "done", "closed")
        alike("advance", *rows, None, 1, None)
        alike("advance", *rows, it.finish, 4, 3)
        left = plain.noise_left(it.masked, it.start, it.stop)
        rows = [left, *it.named("start", "stop", "begin", "end", "age", "done", "bad")]
        alike("ended", it.done, it.bad)
        alike("report", *rows)
        alike("report", *rows, left, it.stop, it.step, it.age, None)
        alike("report", *rows, None, None, it.step, it.age, it.stop - it.start)
        rows[6] = torch.ones_like(it.done)
        alike("report", *rows, left)
        alike("ended", rows[6], torch.zeros_like(it.bad))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_any_scene(batch: int, columns: int, width: int, seed: int) -> None:
    it = Scene(batch, columns, width, seed)
    alike("eligible", *it.named("masked", "positions", "start", "stop"))
    alike("noise", *it.named("ids", "masked", "start", "stop"), width)
    alike("write", *it.named("ids", "masked", "frozen", "done", "positions", "token", "commit", "remask"))
    alike("advance", *it.named("start", "stop", "begin", "end", "age", "step", "done", "closed", "finish"), 5, 4)


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
    assert select.columns(masked, 3).tolist() == [[1, 3, 4]]
