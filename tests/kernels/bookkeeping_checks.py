"""Scenes for a step's bookkeeping, and what kernels and torch must agree on: every number, and nothing else written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_sampler import bookkeeping as plain
from dllm_sampler import select
from dllm_sampler.kernels import bookkeeping as fused
from dllm_sampler.kernels import commit as committing
from tests.kernels.readout_checks import seeded

SCORES = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 0.2, 0.6, 1.0, torch.inf, torch.nan], dtype=torch.float64)
COMMIT = (  # what comes before the score
    "ids", "masked", "frozen", "positions", "start", "stop", "done", "step", "bad", "confidence", "token",
)  # fmt: skip


def shuffled(table: Tensor) -> Tensor:
    """The same numbers at strides of their own: a row is a part of a longer one."""
    wide = table.new_zeros(table.shape[0], table.shape[1] + 3)
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]]


class Scene:
    """A canvas with everything that may stand in one: rows at different places, done, bad, cut, without noise."""

    def __init__(self, batch: int, columns: int, width: int, seed: int, device: str = "cpu"):
        of = seeded(seed)

        def below(most: int, *shape: int) -> Tensor:
            return torch.randint(most, shape, generator=of)

        def chance(share: float, *shape: int) -> Tensor:
            return torch.rand(shape, generator=of) < share

        size = columns + 1
        self.ids = below(90, batch, size)
        self.begin = below(3, batch).clamp(max=columns - 1)
        self.frozen = (torch.arange(size) < self.begin[:, None] + 2) | chance(0.1, batch, size)
        self.frozen[:, -1] = True
        self.masked = chance(0.6, batch, size) & ~self.frozen
        self.start = self.begin + below(columns, batch).minimum(columns - 1 - self.begin)
        self.end = (self.start + 1 + below(columns, batch)).clamp(max=columns)
        self.stop = torch.minimum(self.start + 1 + below(columns, batch), self.end)
        self.age, self.step = below(5, batch), below(50, batch)
        self.done, self.bad = chance(0.3, batch), below(50, batch) * chance(0.3, batch)
        asked = torch.rand(batch, size - 1, generator=of).argsort(1)[:, :width].sort(1).values
        self.positions = torch.full((batch, width), columns)  # short of columns, fillers stand at the empty slot
        self.positions[:, : asked.shape[1]] = asked
        self.positions[:, -1] = columns
        self.token = below(90, batch, width)
        self.commit, self.remask = chance(0.5, batch, width), chance(0.2, batch, width)
        self.confidence = torch.rand(batch, 2, width, generator=of, dtype=torch.float64)
        self.confidence[chance(0.05, batch, 2, width)] = torch.nan
        self.score = SCORES[below(len(SCORES) - seed % 2, batch, width)]  # ties; in every other scene no NaN
        self.closed, self.finish = chance(0.5, batch), chance(0.3, batch)
        for name, value in vars(self).items():
            setattr(self, name, shuffled(value.to(device)) if value.dim() == 2 else value.to(device))

    def named(self, *names: str) -> list[Any]:
        return [getattr(self, name) for name in names]


def alike(name: str, *given: Any, **named: Any) -> None:
    """Both return the same."""
    theirs = getattr(plain, name)(*given, **named)
    ours = getattr(committing if name == "commit" else fused, name)(*given, **named)
    for own, other in zip(*(one if isinstance(one, tuple) else (one,) for one in (ours, theirs)), strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        assert torch.equal(own, other), name


def blocks(it: Scene) -> None:
    """What lies in the block."""
    alike("eligible", *it.named("masked", "positions", "start", "stop"))
    alike("noise_left", *it.named("masked", "start", "stop"))
    asked = it.positions.shape[1]
    for width in {1, asked, asked + 5}:
        alike("noise", *it.named("ids", "masked", "start", "stop"), width)


def writes(it: Scene) -> None:
    """What is written, and of whom."""
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


def commits(it: Scene) -> None:
    """What is chosen, vouched for and written at once, as far as kernels choose."""
    table = it.named(*COMMIT)
    before = [one.clone() for one in table]
    here = {**dict(zip(COMMIT, table, strict=True)), "bad": torch.zeros_like(it.bad)}
    here |= {"start": torch.zeros_like(it.start), "stop": torch.full_like(it.stop, it.ids.shape[1] - 1)}
    here["confidence"] = it.confidence[:, :1].nan_to_num(0.5).float()  # every row may commit
    for score in (it.score, it.score.float()):
        if not select.known(score):
            continue
        for rule in ({"threshold": 0.6}, {"wanted": it.commit}, {"count": it.step % (score.shape[1] + 2)}):
            alike("commit", *table, score, **rule)
            alike("commit", **here, score=score, **rule, forbidden=7)
            alike("commit", **here, score=score, **rule, among=it.remask)
    for own, other in zip(table, before, strict=True):
        assert torch.equal(own.nan_to_num(9), other.nan_to_num(9))


def notes(it: Scene, precise: torch.dtype) -> None:
    """What is taken down, in place."""
    after = plain.write(*it.named("ids", "masked", "frozen", "done", "positions", "token", "commit"))[1]
    sure = it.confidence[:, 1].nan_to_num(0.5)
    wrote = it.commit & (it.positions < it.ids.shape[1] - 1)
    for known, entropy in ((None, False), (None, True), (wrote, True)):
        found = []
        for note in (plain.note, fused.note):
            step_map = torch.full_like(it.ids, -1, memory_format=torch.contiguous_format)
            logprob, spread = torch.zeros(2, *it.ids.shape, dtype=precise, device=it.ids.device)
            rest = it.positions, known, it.commit, it.masked, after, it.step, sure
            note(step_map, logprob, spread if entropy else None, *rest, it.confidence[:, 0] if entropy else None)
            found.append([table[:, :-1] for table in (step_map, logprob, spread)])  # nobody reads the empty slot's
        theirs, ours = found
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[2].nan_to_num(9.0), theirs[2].nan_to_num(9.0))
        torch.testing.assert_close(ours[1], theirs[1], rtol=torch.finfo(precise).eps, atol=0)


def moves(it: Scene) -> None:
    """Where rows go, and what is said of them."""
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


def everything(it: Scene) -> None:
    """All of it."""
    blocks(it)
    writes(it)
    commits(it)
    notes(it, torch.float32)
    moves(it)
