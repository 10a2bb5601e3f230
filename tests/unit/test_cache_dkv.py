"""dKV-Cache (arXiv 2505.15781): the invariants of its specification, and what takes tokens back under it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Query, Result, Sampler
from dllm_sampler.cache.dkv import DelayedCache
from dllm_sampler.cache.dkv_greedy import GreedyCache
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.slots import Slots
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine import layout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.models.transformer import Layer
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, few

TOKENS, LENGTH = 16, 6
STEPWISE = {"name": "fixed", "steps": None}
PARALLEL = {"name": "threshold", "threshold": 0.6}
DRAWN = {"name": "fixed", "score": "random"}


def run(cache: Any, kind: str = "llada", prompts: list[list[int]] = toys.PROMPTS, **plugins: Any) -> Result:
    sampler = toys.sampler(kind, cache=cache, **{"scheduler": PARALLEL, **plugins})
    return sampler.generate(prompts, max_new_tokens=TOKENS, seed=[3 + i for i in range(len(prompts))])


def same(one: Result, two: Result, rows: bool = True) -> bool:
    names = ("ids", "step_map", "nfe") + ("rows",) * rows
    alike = all(torch.equal(getattr(one.trace, name), getattr(two.trace, name)) for name in names)
    return alike and torch.allclose(one.trace.logprob, two.trace.logprob, rtol=0, atol=1e-12)


def steps(cache: Any, kind: str = "llada", **plugins: Any) -> Iterator[tuple[Canvas, toys.Spy, Generation]]:
    """Before every step but the first: the canvas, what was called so far, and the state."""
    spy = toys.Spy(toys.denoiser(kind))
    blocks = plugins.pop("blocks", {"name": "fixed", "length": LENGTH})
    sampler = Sampler(spy, cache=cache, blocks=blocks, **{"scheduler": PARALLEL, "stop": "none", **plugins})
    start = layout.canvas(toys.PROMPTS, TOKENS, toys.SEEDS, spy.spec, sampler.plugins.blocks, CounterNoise(), False)
    for state in Engine(spy, sampler.plugins).run(start, 40):
        yield state.canvas, spy, state


def asked_by(canvas: Canvas, query: Query) -> Tensor:
    """`[B, L+1] bool` queried positions."""
    at = torch.zeros_like(canvas.masked).scatter(1, query.positions, True)
    at[:, -1] = False
    return at


@few("kind", toys.TOYS)
def test_1_refreshed_in_every_forward_it_is_no_cache(kind: str) -> None:
    for settings in ({}, {"per_block": True}, {"per_block": False, "shift": "un_right"}):
        cached = run({"name": "dkv", "refresh_every": 1, **settings}, kind)
        assert same(cached, run("none", kind))
    greedy, plain = (run(cache, kind, scheduler="random_order") for cache in (GreedyCache(1, 2), "none"))
    assert same(greedy, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "shift"), crossed([2, 3, 100], [False, True], together=0))
def test_2_where_positions_do_not_see_each_other_nothing_is_lost(every: int, shift: bool) -> None:
    model = toys.transformer()
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.o_proj.weight.zero_()
    # Such a model says the same at every mask: chance tells positions apart.
    for scheduler in (DRAWN, "random_order"):
        plugins: dict[str, Any] = {"scheduler": scheduler, "temperature": 1.0, "blocks": {"name": "fixed", "length": 5}}
        caches: list[Any] = [DelayedCache(every), DelayedCache(every, "pd"), DelayedCache(None, "prefill")]
        caches += [GreedyCache(every, 1)] if scheduler == "random_order" else [DelayedCache(every, shift="un_right")]
        exact, *cached = (
            Sampler(toys.wrapped(model, shift), cache=cache, stop="none", **plugins).generate(
                toys.PROMPTS, max_new_tokens=TOKENS
            )
            for cache in ["none", *caches]
        )
        for result in cached:
            assert torch.equal(result.tokens, exact.tokens)
            assert torch.equal(result.trace.generated, exact.trace.generated)
            assert (result.trace.rows < exact.trace.rows).sum() >= 4  # a prompt of one token has nothing to freeze


@few("kind", ["llada", "cfg"])
def test_3_what_is_computed_between_refreshes(kind: str) -> None:
    """All but what the forward before the last one had made text; the first two forwards of a block are full."""
    before: list[Canvas] = []
    narrow = 0
    for canvas, spy, state in steps(DelayedCache(4), kind, scheduler=STEPWISE):
        called, _, plan = spy.calls[-1]
        for row in range(len(toys.PROMPTS)):
            if called.done[row]:
                continue
            every = int(called.end[row])
            age = int(called.age[row])
            text = int((called.seen() & ~before[-1].masked)[row].sum()) if before else 0
            expected = every if age < 2 or age % 4 == 0 else every - text
            assert int(plan.entries[row]) == expected
            narrow += expected < every
        before.append(called)
        assert isinstance(state.cache, DelayedCache)
        assert not (state.cache.kept & canvas.masked).any()
        fresh = called.masked & ~canvas.masked  # what this step committed
        assert not (state.cache.kept & fresh).any()
    assert narrow > 10


@pytest.mark.slow
def test_5_greedy_with_a_window_over_the_canvas_computes_every_mask() -> None:
    plugins = {"scheduler": {"name": "random_order", "steps": 10}, "blocks": "full"}
    for every in (2, 3, 5):
        decode = run(DelayedCache(every, per_block=False), **plugins)
        assert same(run(GreedyCache(every, TOKENS), **plugins), decode)
        assert not same(run(GreedyCache(every, 1), **plugins), decode)


REVISING: dict[str, dict[str, Any]] = {
    "rcr": {"name": "rcr"},
    "remdm": {"name": "remdm", "revisions": 3, "tokens": 2},
    "editing": {"name": "editing", "threshold": 0.5, "edit": 0.3, "extra": 4},
    "hierarchical": {"name": "hierarchical", "low": 0.2, "threshold": 0.8, "remask": 0.4},
}


@few("kind", ["llada", "dream"])
@few("name", REVISING)
def test_what_is_taken_back_or_replaced_leaves_the_cache_at_once(name: str, kind: str) -> None:
    cache = DelayedCache(100, per_block=False, shift="un_right")
    before, revised, evicted = None, 0, 0
    for canvas, spy, state in steps(cache, kind, scheduler=REVISING[name], blocks="full"):
        called, _, plan = spy.calls[-1]
        assert isinstance(state.cache, DelayedCache)
        touched = ~called.masked & (canvas.masked | (canvas.ids != called.ids))
        assert not (state.cache.kept & (touched | canvas.masked)).any()
        if before is not None:
            # Whatever changed in the step before is computed, and so is every row that predicts a mask.
            at = toys.computed(plan) | called.done[:, None]
            assert not ((before[0] | called.masked) & ~at & called.seen()).any()
            evicted += int((touched & before[1]).sum())
        revised += int(touched.sum())
        before = touched, state.cache.kept.clone()
    assert revised > 0
    # Some edits need a prediction at the token's place, which a cached row does not give; records do not.
    assert evicted > 0 or name in ("editing", "hierarchical")


@pytest.mark.slow
@few("scheduler", ["random_order", {"name": "origin", "steps": 6}, PARALLEL])
def test_a_stop_hears_only_of_what_was_computed(scheduler: Any) -> None:
    watched = 0
    prophet = {"name": "prophet", "start": 2, "length": 9, "early": 99.0, "mid": 99.0, "late": 99.0}
    for cache in [DelayedCache(3), DualCache(), *([GreedyCache(2, 1)] if scheduler == "random_order" else [])]:
        for _, spy, _ in steps(cache, scheduler=scheduler, stop=prophet):
            called, query, plan = spy.calls[-1]
            asked = asked_by(called, query) & ~called.done[:, None]
            assert not (asked & ~toys.computed(plan)).any()
            watched += int((asked & ~called.in_block()).sum())
    assert watched > 0


class TestLife:
    """A live cache serves one generation; its template serves any number, and nothing stays behind."""

    @each("name", ["dual", "dkv", "dllm", "none"])
    def test_a_live_cache_refuses_a_second_generation(self, name: str) -> None:
        sampler = toys.sampler(cache=name)
        start = layout.canvas([[1, 2]], 8, [0], sampler.denoiser.spec, sampler.plugins.blocks, CounterNoise(), False)
        engine = Engine(sampler.denoiser, sampler.plugins)
        live = next(engine.run(start, 8)).cache
        with refused("cache-in-use"):
            live.init(start, sampler.denoiser.spec)
        with refused("cache-in-use"):
            toys.sampler(cache=live)

    @pytest.mark.slow
    @few("cache", [DelayedCache(3), DualCache()])
    def test_generations_that_take_turns_do_not_meet(self, cache: Any) -> None:
        sampler = toys.sampler(cache=cache, scheduler=STEPWISE)
        alone = [sampler.generate(prompt, max_new_tokens=TOKENS) for prompt in toys.PROMPTS[:2]]
        streams = [sampler.stream(prompt, max_new_tokens=TOKENS) for prompt in toys.PROMPTS[:2]]
        last = [None, None]
        for pair in zip(*streams, strict=True):
            last = list(pair)
        for one, two in zip(alone, last, strict=True):
            assert two is not None and two.result is not None
            assert same(one, two.result)

    @pytest.mark.parametrize("name", ["dkv", pytest.param("dual", marks=pytest.mark.slow), "dllm"])
    def test_nothing_is_left_after_a_generation(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []
        init = Slots.__init__

        def noted(self: Slots, *args: Any) -> None:
            init(self, *args)
            made.append(weakref.ref(self))

        monkeypatch.setattr(Slots, "__init__", noted)
        sampler = toys.sampler("cfg", cache=name)
        for _ in range(3):
            sampler.generate(toys.PROMPTS, max_new_tokens=8)
        gc.collect()
        assert len(made) == 6  # two branches each
        assert not any(ref() is not None for ref in made)


@each(
    ("settings", "says"),
    [
        ({"name": "dkv", "refresh_every": 0}, "option-range: cache.refresh_every"),
        ({"name": "dkv", "shift": "right"}, "choice-unknown: un_right"),
        ({"name": "dkv", "mode": "prefill", "refresh_every": 4}, "options-conflict: cache.refresh_every=4"),
        ({"name": "dkv", "shift": "left"}, "choice-unknown: un_right"),
        ({"name": "dkv", "mode": "greedy"}, "choice-unknown: cache.mode='greedy'"),
        ({"name": "dkv_greedy"}, "cache-incompatible: scheduler=random_order"),
        ({"name": "dkv_greedy", "window": -1}, "option-range: cache.window"),
    ],
)
def test_mistakes_are_one_sentence(settings: dict[str, Any], says: str) -> None:
    with refused(says) as refusal:
        toys.sampler(cache=settings, scheduler=PARALLEL)
    assert "\n" not in str(refusal.value)
