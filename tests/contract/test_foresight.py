"""Where the schedule fixes the sizes of steps, the host does not ask for them, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dllm_sampler import Canvas, Result, Sampler, UserError, layout
from dllm_sampler.buffers import Late
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.canvas import Edit, Query, Sizes
from dllm_sampler.errors import NotFiniteError
from dllm_sampler.layout import LOOK
from dllm_sampler.loop import Engine, State
from dllm_sampler.protocols import Blocks, Stop
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.leftright import LeftToRight
from tests import toys
from tests.contract.cases import CASES, Case, thinned
from tests.contract.test_in_place import Engines, same
from tests.turns import by_turns

CACHES: list[Any] = [
    "none",
    "prefix",
    "dual",
    {"name": "periodic_dual", "every": None},
    "periodic_dual",
    "block_causal",
]
SCHEDULES: list[dict[str, Any]] = [
    {"name": "fixed"},
    {"name": "fixed", "steps": 7},
    {"name": "fixed", "steps": 30, "score": "margin"},
    {"name": "fixed", "steps": 10, "schedule": "timestep"},
    {"name": "fixed", "steps": 13, "schedule": "timestep"},
    {"name": "eoser", "low": 0.0},
    {"name": "leftright", "tokens_per_step": 2},
    {"name": "random_order", "steps": 9},
]
STOPS = [("none", 1), ("prefix", 4), ("block", 3), ("truncate", 100)]  # each with how often the host looks


def sampler(cache: Any, **plugins: Any) -> Sampler:
    return toys.sampler("causal" if cache == "block_causal" else "dream", cache=cache, **plugins)


def answer(it: Sampler, tokens: int = 21) -> Result:
    return it.generate(toys.PROMPTS, max_new_tokens=tokens, seed=toys.SEEDS)


def asking(it: Sampler, tokens: int = 21) -> Result:
    """The answer of a sampler that asks after each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_outlook", lambda *_: None)
        patch.setattr(it, "poll_every", 1)
        return answer(it, tokens)


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """Sizes that the host takes for granted, each held against what the device says."""
    taken: list[Sizes] = []
    known = Engine._known

    def held(self: Engine, state: State) -> Sizes | None:
        sizes, canvas = known(state), state.canvas
        if sizes is not None and not canvas.done.all():
            true = layout.read(canvas, Engine.measure(self, state).tolist(), False).sizes
            assert true is not None
            assert (true.masks, true.block, true.computed) <= (sizes.masks, sizes.block, sizes.computed)
            assert replace(true, masks=sizes.masks, block=sizes.block, computed=sizes.computed) == sizes
            taken.append(sizes)
        return sizes

    monkeypatch.setattr(Engine, "_known", held)
    return taken


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Samplers step on a tape."""
    found = Engines()
    monkeypatch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: found.of(self, plugins))
    return found


@pytest.mark.parametrize(("schedule", "cache", "stop"), by_turns(4, SCHEDULES, CACHES, STOPS))
def test_answers_are_those_of_asking(
    schedule: dict[str, Any], cache: Any, stop: tuple[str, int], granted: list[Sizes]
) -> None:
    it = sampler(cache, scheduler=schedule, stop=stop[0], poll_every=stop[1])
    found = answer(it)
    moved = (schedule["name"], cache) == ("leftright", "block_causal")  # of five rows some row always opens a block
    if not moved and (stop[1] == 1 or cache != "none"):  # where it need not look it asks for no sizes
        assert (len(granted) > 0) == it.plugins.cache.settles
    same(found, asking(it))


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_answers_of_recorded_steps(
    cache: Any,
    granted: list[Sizes],
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the host looks at a step while the next one runs. Schedules take the stops by turns."""
    first = CACHES.index(cache)
    for turn, schedule in list(enumerate(SCHEDULES[:5], first))[first % 3 :: 3]:
        it = sampler(cache, scheduler=schedule, stop=STOPS[turn % len(STOPS)][0])
        found = [answer(it, 14) for _ in range(3)][-1]
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: Engine(self.denoiser, plugins, 1))
            same(found, asking(it, 14))
    assert (len(granted) > 0) == (cache not in ("none", "periodic_dual"))  # without a cache it never asks for sizes


@pytest.mark.parametrize("case", thinned(case for case in CASES if case.sampler.plugins.cache.settles))
def test_whatever_is_granted_is_true(case: Case, granted: list[Sizes]) -> None:
    """Under every scheduler, blocks and stop."""
    case.generate([0, 1, 4], poll_every=3)


class Reads(TorchFunctionMode):
    """Counts how often the host waits for the device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).count += func in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> type[Reads]:
    """Reads of the device between steps."""
    monkeypatch.setattr(Reads, "count", 0)
    poll = Engine.poll

    def counted(*args: Any, **options: Any) -> None:
        with Reads():
            poll(*args, **options)

    monkeypatch.setattr(Engine, "poll", counted)
    return Reads


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 24 tokens, one per step, four blocks: after the first step and at the end of each block.
        ({}, 5),
        ({"cache": "prefix"}, 5),
        ({"cache": "none"}, 5),
        ({"scheduler": {"name": "fixed", "steps": 12}}, 5),
        # The first forward of a block sizes it.
        ({"blocks": {"name": "adablock", "length": 6, "threshold": 2.0}}, 8),
        # A row may end in any step; who can wait for that says so.
        ({"stop": "prefix"}, 24),
        ({"stop": "prefix", "poll_every": 3}, 9),
        # What comes next depends on predictions.
        ({"scheduler": {"name": "threshold", "threshold": 2.0}}, 24),
        ({"cache": {"name": "periodic_dual", "every": 2}}, 24),
    ],
    ids=str,
)
def test_the_host_asks_once_a_block(options: dict[str, Any], expected: int, reads: type[Reads]) -> None:
    it = toys.sampler(**{"cache": "dual", "scheduler": "fixed", **options})
    assert int(it.generate(toys.PROMPTS[:3], max_new_tokens=24).nfe.max()) in (24, 12)
    assert reads.count == expected


@pytest.mark.parametrize(("stop", "waits", "looks"), [("none", 5, 0), ("prefix", 5, 15)])
def test_recorded_steps_are_not_waited_for(
    stop: str,
    waits: int,
    looks: int,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a row may end the host looks, but at the step before; at most one forward is made for nothing."""
    found = {"waits": 0, "looks": 0}
    look, read = Engine._look, Late.read
    monkeypatch.setattr(Engine, "_look", lambda *args: (found.update(waits=found["waits"] + 1), look(*args))[1])
    monkeypatch.setattr(Late, "read", lambda self: (found.update(looks=found["looks"] + 1), read(self))[1])
    it = toys.sampler(cache="dual", scheduler="fixed", stop=stop)
    it.generate(toys.PROMPTS[:3], max_new_tokens=24)
    assert found == {"waits": waits, "looks": looks}


def test_a_row_that_ends_early_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards until the host looks are made, and nobody pays for them."""
    step, made = Engine.step, []
    monkeypatch.setattr(
        Engine, "step", lambda self, state: (made.append(state.canvas.done.all()), step(self, state))[1]
    )
    prompt, plugins = toys.PROMPTS[4], {"cache": "dual", "scheduler": "fixed", "stop": "prefix"}
    found = [toys.sampler("gqa", **plugins, poll_every=n).generate(prompt, max_new_tokens=24) for n in (1, 24)]
    same(*found)
    assert found[0].nfe.item() == 19
    assert sum(made) == 24 - 19 and len(made) == 24 + 19


class Twice(FixedSteps):
    """Commits more than the schedule says."""

    def tell(self, canvas: Canvas, query: Any, readout: Any, carry: Any) -> Any:
        edit, carry = super().tell(canvas, query, readout, carry)
        return replace(edit, commit=edit.commit | (query.positions == canvas.stop[:, None] - 1)), carry


class Rushed(LeftToRight):
    """Commits one more than its number."""

    def tell(self, canvas: Canvas, query: Any, readout: Any, carry: Any) -> Any:
        edit, carry = super().tell(canvas, query, readout, carry)
        return replace(edit, commit=edit.commit | (query.positions == canvas.stop[:, None] - 1)), carry


class Narrow(FixedSteps):
    """Asks for the leftmost masks alone."""

    def ask(self, canvas: Canvas, width: int, carry: Any) -> Query:
        return Query.masks(canvas, min(width, 4))


class Own(Eoser):
    """Commits what the rule inside does not."""

    def tell(self, canvas: Canvas, query: Any, readout: Any, carry: Any) -> Any:
        edit, carry = super().tell(canvas, query, readout, carry)
        return replace(edit, commit=edit.commit | (query.positions == canvas.stop[:, None] - 1)), carry


class Fresh(DualCache):
    """Refreshes at every second forward of a block."""

    def due(self, canvas: Canvas) -> Tensor:
        return canvas.age % 2 == 0


class Picky(DualCache):
    """Serves the first half of what is asked."""

    def narrow(self, canvas: Canvas, query: Query) -> Query:
        asked.append(1)
        return super().narrow(canvas, query)


class Pushy(Stop):
    """Makes rows leave their block."""

    def __call__(self, canvas: Canvas, query: Query, readout: Any, edit: Any) -> Any:
        return replace(edit, leave=canvas.age >= 1)


asked: list[int] = []


class Short(Blocks):
    """Leaves a block after two forwards."""

    def lookahead(self, tokens: int) -> int:
        return 6

    def close(self, before: Canvas, after: Canvas, edit: Edit) -> Tensor:
        return super().close(before, after, edit) | (before.age > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": Twice()},
        {"scheduler": Rushed()},
        {"scheduler": Narrow(steps=8)},
        {"scheduler": Own(FixedSteps())},
        {"cache": Fresh()},
        {"blocks": Short(), "max_steps": 8},
    ],
    ids=["tell", "leftright", "ask", "eoser", "due", "close"],
)
def test_a_rule_of_ones_own_promises_nothing(options: dict[str, Any], granted: list[Sizes]) -> None:
    it = toys.sampler(**{"cache": "dual", "scheduler": "fixed", **options})
    same(answer(it), asking(it))
    assert not granted


def test_a_cache_that_narrows_by_itself_is_asked_to() -> None:
    asked.clear()
    toys.sampler(cache=Picky()).generate(toys.PROMPTS[:2], max_new_tokens=12)
    assert asked


def test_a_stop_moves_no_row() -> None:
    with pytest.raises(UserError, match="stop=Pushy decides when a row leaves its block"):
        toys.sampler(stop=Pushy()).generate(toys.PROMPTS[:2], max_new_tokens=12)


def test_the_host_looks_at_last() -> None:
    """However far a schedule is certain: what fails is not run on to the end."""
    model = toys.transformer()
    it = Sampler(toys.wrapped(model), scheduler="fixed", cache="none", stop="none", blocks="full")
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(NotFiniteError) as caught:
        it.generate(toys.PROMPTS[:2], max_new_tokens=44)
    assert caught.value.step == 1 and caught.value.result.nfe.max() <= 1 + LOOK


def test_nan_is_reported_for_the_step_it_came_in() -> None:
    model = toys.transformer()
    it = Sampler(
        toys.wrapped(model), scheduler="fixed", cache="dual", stop="none", blocks={"name": "fixed", "length": 6}
    )
    stream = it.stream(toys.PROMPTS[:2], max_new_tokens=24)
    for _ in range(3):
        next(stream)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(NotFiniteError) as caught:
        list(stream)
    assert caught.value.step == 4 and caught.value.rows == [1, 2]
