"""Steps in place, recorded and replayed, are the steps of the loop: the same tokens, forwards and history.

A CUDA graph repeats launches, not Python. Here a tape stands in for it: every torch operation of a step is written down
with the tensors it worked on, and a replay repeats those operations on the state as it then is. A number that the host
took from the first run, or a tensor that moved, shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dllm_sampler import Sampler
from dllm_sampler.cache.base import Slots
from dllm_sampler.graphs import InPlace, Record, StaticEngine, Step
from dllm_sampler.plugins import Plugins
from tests.contract.cases import CASES, Case


class Tape(TorchDispatchMode):
    """Writes down operations; `play` repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        now: dict[int, Tensor] = {}
        for func, args, kwargs, out in self.operations:
            given = tree_map(lambda one: now.get(id(one), one), (args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*given[0], **given[1])), strict=True):
                now[id(old)] = new


def taped(run: Callable[[], None]) -> Callable[[], None]:
    tape = Tape()
    with tape:
        run()
    return tape.play


class Taped(StaticEngine):
    """Takes back what a recording did, since recording a graph does nothing either."""

    replays = 0

    def _recorded(self, state: InPlace, record: Record) -> Step | None:
        homes = state.buffers.homes.values()
        tensors = [one for home in homes for one in (home.keys + home.values if isinstance(home, Slots) else [home])]
        before = [tensor.clone() for tensor in tensors]
        step = super()._recorded(state, record)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        assert step is not None
        play = step.replay

        def replay() -> None:
            type(self).replays += 1
            play()

        step.replay = replay
        return step


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Taped]:
    """Samplers step on a tape; the engines, one per sampler and block length."""
    made: dict[tuple[int, int], Taped] = {}
    Taped.replays = 0

    def engine(self: Sampler, plugins: Plugins) -> Taped:
        found = made.get((id(self), id(plugins)))
        if found is None:
            found = made[id(self), id(plugins)] = Taped(self.denoiser, plugins, self.poll_every, record=taped)
        return found

    monkeypatch.setattr(Sampler, "_engine", engine)
    return made  # type: ignore[return-value]


def records(case: Case) -> bool:
    plugins = case.sampler.plugins
    return not plugins.cache.syncs and plugins.scheduler.static


@pytest.mark.parametrize("case", [case for case in CASES if records(case)], ids=lambda case: case.id)
def test_replayed_steps_are_the_steps(case: Case, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    rows = [0, 1, 4]
    expected = case.generate(rows)
    request.getfixturevalue("recorded")
    found = case.generate(rows)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.nfe, expected.nfe)
    assert torch.equal(found.trace.step_map, expected.trace.step_map)
    assert torch.equal(found.trace.rows, expected.trace.rows)
