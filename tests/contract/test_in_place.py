"""Steps in place, recorded and replayed, are the steps of the loop: the same tokens, forwards and history.

A CUDA graph repeats launches, not Python. Here a tape stands in for it: every torch operation of a step is written down
with the tensors it worked on, and a replay repeats those operations on the state as it then is. A number that the host
took from the first run, or a tensor that moved, shows as a wrong token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dllm_sampler import Commits, Result, Sampler, UserError, graphs, layout
from dllm_sampler.buffers import Step, walk
from dllm_sampler.cache.slots import Slots
from dllm_sampler.canvas import Sizes
from dllm_sampler.capture import Record
from dllm_sampler.errors import NotFiniteError
from dllm_sampler.graphs import InPlace, StaticEngine, obstacle
from dllm_sampler.kernels import backend
from dllm_sampler.loop import Engine, State
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.moe import MoE, MoeConfig
from dllm_sampler.noise import CounterNoise, ReplayNoise
from dllm_sampler.plugins import Plugins
from dllm_sampler.protocols import Denoiser
from tests import toys
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

    def play(self) -> Any:
        now: dict[int, Tensor] = {}
        new: Any = None
        for func, args, kwargs, out in self.operations:
            given = tree_map(lambda one: now.get(id(one), one), (args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(func(*given[0], **given[1])), strict=True):
                now[id(old)] = new
        return new


def taped(run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], Any]:
    """Says whether it did anything."""
    condition, tape = Tape(), Tape()
    if wanted is not None:
        with condition:
            wanted()
    with tape:
        run()

    def play() -> bool:
        does = wanted is None or bool(condition.play())
        if does:
            tape.play()
        return does

    return play


class Taped(StaticEngine):
    """Takes back what a recording did, since recording a graph does nothing either."""

    replays = waits = 0
    sends = vain = 0  # steps that were sent before it was known which is right; those of which none was

    def step(self, state: State) -> None:
        before = type(self).replays
        super().step(state)
        made = type(self).replays - before
        assert made <= 1
        sent = isinstance(state, InPlace) and len(state.sent) > 0
        type(self).sends += sent
        type(self).vain += sent and made == 0

    def _look(self, state: State, known: Sizes | None) -> list[int]:
        type(self).waits += 1
        return super()._look(state, known)

    def _recorded(self, state: InPlace, record: Record, numbers: Tensor | None) -> Step | None:
        homes = state.buffers.homes.values()
        tensors = [one for home in homes for one in (home.keys + home.values if isinstance(home, Slots) else [home])]
        before = [tensor.clone() for tensor in tensors]
        step = super()._recorded(state, record, numbers)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        assert step is not None
        play = step.replay

        def replay() -> None:
            type(self).replays += cast(Any, play())

        step.replay = replay
        return step


class Engines:
    """The engines of the samplers of a test."""

    def __init__(self) -> None:
        self.made: dict[Sampler, Taped] = {}  # held: another sampler may be made where one has gone

    def of(self, sampler: Sampler, plugins: Plugins) -> Taped:
        if sampler not in self.made:
            self.made[sampler] = Taped(sampler.denoiser, plugins, sampler.poll_every, record=taped, chooses=True)
        return self.made[sampler]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Samplers step on a tape."""
    found = Engines()
    Taped.replays = Taped.vain = Taped.waits = 0
    monkeypatch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: found.of(self, plugins))
    return found


def records(case: Case) -> bool:
    plugins = case.sampler.plugins
    return not plugins.cache.syncs and plugins.scheduler.traits.static


def recorded() -> Iterator[Any]:
    """All cases that can be; slow are those whose scheduler and cache others before them have."""
    met: set[str] = set()
    for case in CASES:
        if records(case):
            own = {f"scheduler {case.scheduler['name']}", f"cache {case.cache['name']}", f"toy {case.toy}"}
            yield pytest.param(case, id=case.id, marks=() if own - met else pytest.mark.slow)
            met |= own


@pytest.mark.parametrize("case", list(recorded()))
def test_replayed_steps_are_the_steps(case: Case, request: pytest.FixtureRequest) -> None:
    rows = [0, 4]
    expected = case.generate(rows)
    request.getfixturevalue("engines")
    found = case.generate(rows)
    same(found, expected)


def same(found: Result, expected: Result) -> None:
    for name in ("ids", "step_map", "nfe", "rows", "end"):
        assert torch.equal(getattr(found.trace, name), getattr(expected.trace, name)), name
    for name in ("tokens", "lengths", "complete"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    # Sizes are rounded up, so that sums are made in another order.
    assert torch.allclose(found.trace.logprob, expected.trace.logprob, rtol=0, atol=1e-12)


PLUGINS: list[dict[str, Any]] = [
    {"cache": "none", "scheduler": {"name": "threshold", "threshold": 0.3}},
    {"cache": "dual", "temperature": 0.8},
    {"cache": "prefix", "scheduler": {"name": "klass", "threshold": 0.3, "divergence": 1.0}},
    {"cache": "trailing", "scheduler": "leftright"},
    {"cache": "periodic_dual", "scheduler": {"name": "budgeted", "threshold": 0.5}},
]


# Each with how often, in three generations, the host waits or none of what it sent is right (at the end none is).
GUESSED: list[tuple[dict[str, Any], int]] = [
    ({"cache": "dual", "stop": "truncate"}, 8),
    ({"cache": "prefix", "scheduler": {"name": "klass", "threshold": 0.3, "divergence": 1.0}}, 14),
    ({"cache": {"name": "dllm", "response_every": 3}}, 6),
    ({"cache": "block_causal", "toy": "causal"}, 7),
    ({"cache": {"name": "periodic_dual", "every": 3}}, 6),
    ({"cache": "dual", "blocks": "adablock"}, 6),
]
MORE: list[tuple[dict[str, Any], int]] = [
    ({"cache": "dual"}, 7),
    ({"cache": "prefix"}, 7),
    ({"cache": "dual", "scheduler": "slowfast", "temperature": 0.8}, 8),
    ({"cache": "dkv"}, 9),
    ({"cache": "dual", "toy": "cfg"}, 6),
    ({"cache": "vicinity", "scheduler": "localleap"}, 4),
]


@pytest.mark.parametrize(
    ("plugins", "missed"), [*GUESSED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)], ids=str
)
def test_steps_that_are_sent_before_it_is_known_that_they_are_right(
    plugins: dict[str, Any], missed: int, engines: Engines
) -> None:
    """The host waits seldom; what it sent in vain does nothing."""
    plugins = {"scheduler": {"name": "threshold", "threshold": 0.6}, "blocks": {"name": "fixed", "length": 9}} | plugins
    it = toys.sampler(plugins.pop("toy", "gqa"), **plugins)
    engines.of(it, it.plugins)
    found: list[int] = []
    # dllm counts forwards on the host: for each count there is a recording, which is met less often.
    for seed in (0, 1) * (4 if "dllm" in str(plugins) else 2) + (2,):
        prompts = [[5, 11, 3, seed], [16]]
        with pytest.MonkeyPatch.context() as patch:
            plain = Engine(it.denoiser, it.plugins, 1)
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, plain=plain: plain)
            expected = it.generate(prompts, max_new_tokens=18, seed=seed)
        Taped.replays = Taped.vain = Taped.waits = 0
        same(it.generate(prompts, max_new_tokens=18, seed=seed), expected)
        found.append(Taped.vain + Taped.waits)
    assert sum(found[-3:]) <= missed


@pytest.mark.parametrize("plugins", PLUGINS, ids=str)
def test_one_generation_after_another(plugins: dict[str, Any], engines: Engines) -> None:
    """The second finds the recordings of the first, whatever stands in the buffers, and most of it is replayed."""
    once = toys.sampler("gqa", **plugins)
    engine = engines.of(once, once.plugins)
    first, second = ([[5, 11, 3], [16]], 0), ([[7, 1, 30], [2]], 5)
    longer = [[4, 4, 28, 13, 33], [12, 6]], 1
    steps: list[int] = []
    for prompts, seed in (first, second, second, longer):
        before = Taped.replays
        found = once.generate(prompts, max_new_tokens=17, seed=seed)
        steps.append(Taped.replays - before)
        plain = Engine(once.denoiser, once.plugins, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, plain=plain: plain)
            expected = once.generate(prompts, max_new_tokens=17, seed=seed)
        same(found, expected)
        if len(steps) == 3:  # every step, and one in which all rows rest
            assert steps[-1] == int(expected.nfe.max()) + (plugins["cache"] == "none")
    assert len(engine.free) == 1


def test_recordings_of_several_shapes_are_kept(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of nearly the same length share them; they go, the oldest first, where room is short."""
    it = toys.sampler("gqa", scheduler={"name": "fixed", "steps": 6}, stop="none", cache="dual")
    engine = engines.of(it, it.plugins)
    plain = toys.sampler("gqa", scheduler={"name": "fixed", "steps": 6}, stop="none", cache="dual")

    def replayed(length: int) -> int:
        before, prompt = Taped.replays, [[5, 11, 3, 16, 7] * 9][0][:length]
        found = it.generate([prompt], max_new_tokens=12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: Engine(plain.denoiser, plugins, 1))
            same(found, plain.generate([prompt], max_new_tokens=12))
        return Taped.replays - before

    assert replayed(3) < 6 == replayed(17) == replayed(32)
    assert replayed(33) < 6 == replayed(3)
    assert [one.fits[0] for one in engine.free] == [(1, 64 + 1), (1, 32 + 13)]  # not more than the context
    monkeypatch.setattr(graphs, "ROOM", engine.free[1].size)
    assert replayed(40) == 6 and [one.fits[0] for one in engine.free] == [(1, 64 + 1)]  # no room for the other
    monkeypatch.setattr(graphs, "ROOM", 2**31)
    monkeypatch.setattr(graphs, "KEPT", 2)
    for prompts in ([[5]], [[5], [6]]):
        it.generate(prompts, max_new_tokens=12)
    assert [one.fits[0] for one in engine.free] == [(1, 32 + 13), (2, 32 + 13)]
    monkeypatch.setattr(graphs, "ROOM", 0)
    for stream in [cast(Any, it.stream([[5]], max_new_tokens=12)) for _ in range(3)]:
        next(stream)
        next(stream)
        stream.close()
    assert len(engine.free) == 1  # the latest stay


def test_padding_stays_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of someone else's may know no position beyond."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=64,
    )  # fmt: skip
    it = Sampler(MaskedLMDenoiser(BertForMaskedLM(config).eval(), mask_id=3, eos_id=1, pad_id=0), stop="none")
    for length in (5, 33, 52):
        found = []
        for engine in (StaticEngine(it.denoiser, it.plugins, 1), Engine(it.denoiser, it.plugins, 1)):
            monkeypatch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, engine=engine: engine)
            found.append(it.generate([[5 + length % 7] * length], max_new_tokens=12))
        same(*found)


def test_recordings_hold_for_weights_where_they_are(engines: Engines) -> None:
    """New values are seen, new addresses make new recordings."""
    model = toys.transformer(kv_heads=2)
    it = Sampler(toys.wrapped(model), cache="dual")
    engine, weight = engines.of(it, it.plugins), model.layers[0].get_parameter("q_proj.weight")
    buffers = []
    for change in (lambda: None, lambda: weight.mul_(2), lambda: setattr(weight, "data", weight.data / 3)):
        with torch.no_grad():
            change()
        found = [it.generate(toys.PROMPTS[:2], max_new_tokens=9) for _ in range(2)][-1]
        buffers.append(*engine.free)
        plain = Engine(it.denoiser, it.plugins, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, plain=plain: plain)
            same(found, it.generate(toys.PROMPTS[:2], max_new_tokens=9))
    assert buffers[0] is buffers[1] is not buffers[2]


def test_slots_are_made_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that finds the recordings of another works in its slots, and they are zeros again."""
    made: list[Slots] = []
    buffers, step = Slots._buffers, Taped.step
    monkeypatch.setattr(Slots, "_buffers", lambda self: (made.append(self), buffers(self))[1])
    it = toys.sampler("gqa", cache="dual", blocks={"name": "fixed", "length": 6})
    held: list[float] = []

    def noted(self: Taped, state: State) -> None:
        slots = state.cache.slots
        assert slots is not None
        held.append(sum(float(one.abs().sum()) for one in slots.keys + slots.values))
        step(self, state)

    monkeypatch.setattr(Taped, "step", noted)
    for _ in range(3):
        held.clear()
        it.generate(toys.PROMPTS[:2], max_new_tokens=12)
        assert held[0] == 0 < held[1]
    assert len(made) == 2 and made[0] is made[1]  # keys and values


def test_generations_that_overlap(engines: Engines) -> None:
    it = toys.sampler("llada", cache="dual", scheduler={"name": "threshold", "threshold": 0.3})
    alone = [it.generate(toys.PROMPTS[i], max_new_tokens=12, seed=i) for i in (0, 0)]
    streams = [it.stream(toys.PROMPTS[0], max_new_tokens=12, seed=seed) for seed in (0, 0)]
    last: list[Commits | None] = [None, None]
    lengths = [0, 0]
    for pair in zip_longest(*streams):
        last = [new or old for new, old in zip(pair, last, strict=True)]
        lengths = [length + (new is not None) for length, new in zip(lengths, pair, strict=True)]
    # That which finds recordings learns a step later that it is over.
    assert lengths[0] - 1 <= lengths[1] <= lengths[0]
    for one, expected in zip(last, alone, strict=True):
        assert one is not None and one.result is not None
        same(one.result, expected)


def test_stop_strings_and_progress(engines: Engines) -> None:
    """The host changes `done` between two steps, and the next one sees it."""
    seen: list[int] = []
    it = toys.sampler("llada", cache="none")
    found = it.generate(toys.PROMPTS[:2], max_new_tokens=12, progress=lambda step, done, all: seen.append(done))
    assert seen == sorted(seen) and seen[-1] == 24 and bool(found.complete.all())


class Letters:
    """A tokenizer for which a token is a letter."""

    pad_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(ord("a") + one) for one in ids)

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return [self.decode(row) for row in rows]


def test_a_row_that_a_string_ends_while_steps_are_sent_ahead(engines: Engines) -> None:
    """The host ends it between two steps, the second of which is on its way to being sent."""
    rule = {"name": "threshold", "threshold": 0.6}
    it = toys.sampler("gqa", cache="dual", scheduler=rule, blocks={"name": "fixed", "length": 9}, stop="none")
    it.tokenizer = cast(Any, Letters())
    engines.of(it, it.plugins)
    full = [it.generate(toys.PROMPTS[:2], max_new_tokens=18) for _ in range(3)][-1]
    assert full.texts is not None
    shorter = 0
    for place in range(9):
        stop = full.texts[0][place : place + 2]
        with pytest.MonkeyPatch.context() as patch:
            plain = Engine(it.denoiser, it.plugins, 1)
            patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, plain=plain: plain)
            expected = it.generate(toys.PROMPTS[:2], max_new_tokens=18, stop_strings=stop)
        Taped.sends = 0
        same(it.generate(toys.PROMPTS[:2], max_new_tokens=18, stop_strings=stop), expected)
        shorter += int(expected.nfe[0] < full.nfe[0])
        assert 2 * Taped.sends > int(expected.nfe.max())
    assert shorter > 3


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_model_that_is_not_finite(cache: str, engines: Engines) -> None:
    model = toys.transformer()
    it = Sampler(toys.wrapped(model), cache=cache, stop="none", blocks={"name": "fixed", "length": 6})
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(NotFiniteError) as caught:
        it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    assert caught.value.step == 1 and caught.value.rows == [1, 2]


def test_a_model_that_fails_while_steps_are_sent_ahead(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind the one that failed does nothing, and the failure is found at the same forward."""
    model = toys.transformer()
    it = Sampler(
        toys.wrapped(model), cache="dual", stop="none", blocks={"name": "fixed", "length": 9},
        scheduler={"name": "threshold", "threshold": 0.9},
    )  # fmt: skip
    expected = [it.generate(toys.PROMPTS[:2], max_new_tokens=18) for _ in range(3)][-1]
    read = Taped._check

    def check(self: Taped, state: InPlace) -> None:
        read(self, state)
        with torch.no_grad():
            model.norm.weight[0] = torch.nan

    monkeypatch.setattr(Taped, "_check", check)
    with pytest.raises(NotFiniteError) as caught:
        it.generate(toys.PROMPTS[:2], max_new_tokens=18)
    result = caught.value.result
    assert result is not None and caught.value.step > 2
    assert torch.equal(result.trace.nfe.amax(), torch.tensor(caught.value.step))
    before = result.trace.step_map >= 0
    assert bool(before.any()) and torch.equal(result.trace.ids[before], expected.trace.ids[before])


def test_a_step_that_cannot_be_recorded_runs_without() -> None:
    def fails(run: Callable[[], None], wanted: object = None) -> Callable[[], None]:
        run()  # and what it did to the state's objects must be undone
        raise RuntimeError("operation not permitted")

    class Failing(Taped):
        def _recorded(self, state: InPlace, record: Record, numbers: Tensor | None) -> Step | None:
            tensors = [home for home in state.buffers.homes.values() if isinstance(home, Tensor)]
            before = [tensor.clone() for tensor in tensors]
            step = StaticEngine._recorded(self, state, record, numbers)
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            return step

    it = toys.sampler("llada", scheduler={"name": "klass", "threshold": 0.3, "divergence": 1.0})
    expected = it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    backend.warn.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        engine = Failing(it.denoiser, it.plugins, 1, record=fails)
        patch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: engine)
        with pytest.warns(RuntimeWarning, match="runs without one: operation not permitted"):
            same(it.generate(toys.PROMPTS[:2], max_new_tokens=12), expected)
    assert engine.record is None


def test_a_step_that_no_condition_fits_is_recorded_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses some things inside a conditional node that it records elsewhere."""
    refused: list[object] = []

    def record(run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], Any]:
        if wanted is not None:
            refused.append(wanted)
            raise RuntimeError("RNG within data-dependent conditional nodes is not supported yet.")
        return taped(run)

    class Refusing(Taped):
        def _recorded(self, state: InPlace, record: Record, numbers: Tensor | None) -> Step | None:
            return (
                StaticEngine._recorded(self, state, record, numbers)
                if numbers is not None
                else super()._recorded(state, record, numbers)
            )

    rule = {"name": "threshold", "threshold": 0.6}
    it = toys.sampler("gqa", cache="dual", scheduler=rule, blocks={"name": "fixed", "length": 9})
    expected = it.generate(toys.PROMPTS[:2], max_new_tokens=18)
    engine = Refusing(it.denoiser, it.plugins, 1, record=record, chooses=True)
    monkeypatch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1: engine)
    backend.warn.cache_clear()
    Taped.replays = Refusing.replays = 0
    with pytest.warns(RuntimeWarning, match="waits for a step.*RNG within data-dependent"):
        found = [it.generate(toys.PROMPTS[:2], max_new_tokens=18) for _ in range(4)]
    for one in found:
        same(one, expected)
    assert len(refused) == 1 and engine.record is record and not engine.chooses
    assert Refusing.replays > 2 * int(expected.nfe.max())


def test_a_step_that_was_sent_is_made_though_another_generation_finds_that_none_should_be(engines: Engines) -> None:
    rule = {"name": "threshold", "threshold": 0.6}
    it = toys.sampler("gqa", cache="dual", scheduler=rule, blocks={"name": "fixed", "length": 9})
    engine = engines.of(it, it.plugins)
    expected = [it.generate(toys.PROMPTS[:2], max_new_tokens=18) for _ in range(4)][-1]
    guess, guessed = engine._guess, list[bool]()

    def last(state: InPlace) -> bool:
        guessed.append(guess(state))
        engine.chooses = engine.chooses and not guessed[-1]  # as a recording that fails elsewhere leaves it
        return guessed[-1]

    engine._guess = last
    same(it.generate(toys.PROMPTS[:2], max_new_tokens=18), expected)
    assert sum(guessed) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "the model is on cpu"),
        ({"cuda_graph": "yes"}, "cuda_graph must be true, false or auto, not 'yes'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        toys.sampler(**{"cuda_graph": True, **options})
    assert type(toys.sampler(cuda_graph="auto")._engine(toys.sampler().plugins)) is Engine


@pytest.mark.parametrize(
    ("plugins", "noise", "why"),
    [
        ({"cache": "elastic"}, None, "ElasticCache reads the device"),
        ({"scheduler": {"name": "apd", "verifier": toys.verifier()}}, None, "ParallelDecoding asks a second model"),
        ({}, ReplayNoise(0, "llada"), "ReplayNoise draws on the host"),
    ],
    ids=["elastic", "apd", "noise"],
)
def test_what_is_refused_on_a_gpu(plugins: dict[str, Any], noise: Any, why: str) -> None:
    it = toys.sampler(noise=noise, **plugins)
    there = on_a_gpu(it.denoiser, torch.nn.Linear(1, 1))
    assert why in (obstacle(it.plugins, it.noise, there) or "")
    assert obstacle(toys.sampler().plugins, CounterNoise(), there) is None


def on_a_gpu(denoiser: Denoiser, network: torch.nn.Module) -> Any:
    """What a denoiser of this network says of itself there."""
    return SimpleNamespace(spec=replace(denoiser.spec, device=torch.device("cuda")), model=network)


class Sharded(torch.nn.Parameter):
    device_mesh = "as a DTensor has"


def hook(network: Any) -> None:
    network.layers[1].register_forward_hook(lambda *_: None)


def forward(network: Any) -> None:
    network.lm_head.forward = lambda hidden: hidden


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda network: None, None),
        (lambda network: network.layers[1].to("meta"), "weights lie on cpu and meta"),
        (lambda network: network.to("meta"), "weights lie on meta"),
        (lambda network: setattr(network.norm, "weight", Sharded(network.norm.weight)), "weights are sharded"),
        (hook, r"is at the model's layers\.1: "),
        (forward, "is at the model's lm_head: "),
    ],
    ids=["as it is", "two devices", "meta", "sharded", "hook", "forward"],
)
def test_models_that_no_recording_repeats(change: Callable[[Any], object], why: str | None) -> None:
    network, it = toys.transformer(), toys.sampler()
    change(network)
    for there in (on_a_gpu(it.denoiser, network), on_a_gpu(it.denoiser, cast(torch.nn.Module, torch.compile(network)))):
        found = obstacle(it.plugins, it.noise, there)
        assert found is None if why is None else re.search(why, found or "")


def test_two_networks_on_two_devices_are_not_recorded() -> None:
    it = toys.sampler()
    other = SimpleNamespace(spec=it.denoiser.spec, model=torch.nn.Linear(1, 1, device="meta"))
    there = on_a_gpu(it.denoiser, toys.transformer())
    assert obstacle(it.plugins, it.noise, there) is None
    there.weak = other
    assert "lie on cpu and meta" in (obstacle(it.plugins, it.noise, there) or "")


@pytest.mark.parametrize(
    ("dtype", "width", "major", "waiting"),
    [
        (torch.bfloat16, 16, 9, False),
        (torch.bfloat16, 16, 10, False),
        (torch.bfloat16, 16, 8, True),
        (torch.bfloat16, 16, 12, True),
        (torch.float16, 16, 9, True),
        (torch.float32, 16, 9, True),
        (torch.float64, 16, 8, False),
        (torch.bfloat16, 12, 8, False),  # not aligned
    ],
)
def test_experts_that_wait(
    dtype: torch.dtype, width: int, major: int, waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    config, it = MoeConfig(num_experts=2, top_k=1, expert_size=16, layers=frozenset()), toys.sampler()
    found = obstacle(it.plugins, it.noise, on_a_gpu(it.denoiser, MoE(config, width, None).to(dtype)))
    assert ("waits for the GPU" in (found or "")) == waiting


def test_an_unknown_keeper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = toys.sampler("llada")
    expected = it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    init = type(it.plugins.scheduler).init
    monkeypatch.setattr(
        type(it.plugins.scheduler), "init", lambda self, canvas: (init(self, canvas), torch.Generator())
    )
    tell = type(it.plugins.scheduler).tell

    def told(self: Any, canvas: Any, query: Any, seen: Any, carry: Any) -> Any:
        edit, rest = tell(self, canvas, query, seen, carry[0])
        return edit, (rest, carry[1])

    monkeypatch.setattr(type(it.plugins.scheduler), "tell", told)
    for must in (True, False):
        engine = Taped(it.denoiser, it.plugins, 1, record=taped, must=must, chooses=True)
        monkeypatch.setattr(Sampler, "_engine", lambda self, plugins, _samples=1, engine=engine: engine)
        if must:
            with pytest.raises(UserError, match=r"carry\.1 is a Generator"):
                it.generate(toys.PROMPTS[:2], max_new_tokens=12)
        else:
            backend.warn.cache_clear()
            with pytest.warns(RuntimeWarning, match="steps run without CUDA graphs.*Generator"):
                same(it.generate(toys.PROMPTS[:2], max_new_tokens=12), expected)
    with pytest.raises(UserError, match=r"carry\.1 is a Generator, and nobody knows what it keeps"):
        walk((torch.zeros(1), torch.Generator()), lambda _, leaf: leaf, "carry")


def test_a_step_in_place_computes_few_columns_in_vain() -> None:
    """Sizes are rounded, so that there are fewer recordings: by an eighth at most, and common windows not at all."""
    p = toys.sampler(cache="dual").plugins
    spec = toys.denoiser().spec
    engine = StaticEngine(toys.denoiser(), p, 1, record=lambda run, wanted=None: run)
    canvas = layout.canvas([[5]], 2000, [0], spec, p.blocks, CounterNoise(), p.stop.cuts)
    found = []
    for computed in range(1, 1025):
        sizes = replace(canvas.sizes, computed=computed, whole=False)
        found.append(engine._rounded(canvas, sizes).computed)
        assert computed <= found[-1] <= computed * 9 / 8
        assert found[-1] == computed or computed not in (*range(1, 17), 24, 32, 48, 64, 96, 128, 256)
    assert len(set(found)) == 16 + 6 * 8
