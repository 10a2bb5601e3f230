"""Caches around another one: what they hand on, and those that hide masks after the block (DPad, Streaming-dLLM)."""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import exp, pi, sqrt
from typing import Any, ClassVar, get_origin, get_type_hints
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Query, Readout, Result, Sampler, config
from dllm_sampler.cache.dpad import DPadCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.periodic import PeriodicDual
from dllm_sampler.cache.streaming import StreamingCache
from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.core.protocols import Cache
from dllm_sampler.schedulers.streaming import StreamingThreshold
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, few

# Caches that hide masks behind the block: DPad (arXiv 2508.14148) and Streaming-dLLM (arXiv 2601.17917)


TOKENS, BLOCK = 14, 4
RULE = {"name": "threshold", "threshold": 0.8}
EVERYTHING: list[dict[str, Any]] = [
    {"name": "dpad", "window": 2**31 - 1, "scale": 100.0, "sigma": 0.0},
    {"name": "dpad", "dropout": "even", "window": 2**31 - 1, "scale": 100.0, "sigma": 0.0},
    {"name": "dpad", "dropout": "uniform", "window": 1, "number": TOKENS},
    {"name": "streaming", "window": TOKENS},
]
DPAD = {"name": "dpad", "window": 9, "scale": 1.6}
STREAMING = {"name": "streaming", "window": 3}


def spied(kind: str = "llada", **plugins: Any) -> tuple[toys.Spy, Sampler]:
    spy = toys.Spy(toys.denoiser(kind))
    given = {"scheduler": RULE, "blocks": {"name": "fixed", "length": BLOCK}, "stop": "none", **plugins}
    return spy, Sampler(spy, **given)


def answer(prompts: Any = toys.PROMPTS, kind: str = "llada", **plugins: Any) -> tuple[toys.Spy, Result]:
    spy, sampler = spied(kind, **plugins)
    seeds = toys.SEEDS[: len(prompts)] if isinstance(prompts[0], list) else 3
    return spy, sampler.generate(prompts, max_new_tokens=TOKENS, seed=seeds)


def opened(canvas: Tensor | int = 8, start: int = 2, stop: int = 5, rows: int = 1, **changes: Any) -> Canvas:
    """Rows whose block [start, stop) opens on a canvas of masks."""
    made = toys.canvas(torch.ones(rows, int(canvas), dtype=torch.bool), **changes)
    return replace(made, start=made.start + start, stop=torch.full_like(made.stop, stop))


def kept(cache: SuffixCache, canvas: Canvas) -> list[list[int]]:
    """Columns behind the block that stay, of each row."""
    live = cache.init(canvas, toys.denoiser().spec)
    shown = live.computes(canvas) & canvas.seen() & (canvas.columns() >= canvas.stop[:, None])
    return [row.nonzero()[:, 0].tolist() for row in shown]


# Keeping everything is Fast-dLLM


@pytest.mark.parametrize(("kind", "inner"), crossed(["dream", "cfg"], ["none", "prefix", "dual"], together=0))
def test_a_window_over_all_is_the_cache_inside(kind: str, inner: str) -> None:
    _, plain = answer(kind=kind, cache=inner)
    for cache in EVERYTHING:
        _, found = answer(kind=kind, cache={**cache, "inner": inner})
        for name in ("tokens", "nfe"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), cache
        assert torch.equal(found.trace.generated, plain.trace.generated)
        assert torch.equal(found.trace.rows, plain.trace.rows)


@pytest.mark.slow
@few("inner", ["none", "prefix", "dual"])
def test_the_last_block_sees_all(inner: str) -> None:
    for cache in (DPAD, STREAMING):
        spy, _ = answer(cache={**cache, "inner": inner})
        for canvas, query, _ in spy.calls:
            assert query.hidden is not None
            last = (canvas.stop == canvas.end) & ~canvas.done
            assert not query.hidden[last].any()
            assert query.hidden[~last & (canvas.stop + 10 < canvas.end)].any(1).all()


# What is hidden does not exist


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inner"), crossed(["gqa", "dream"], ["none", "prefix", "dual", "sparse"], together=0))
def test_what_stands_at_hidden_columns_changes_nothing(kind: str, inner: str) -> None:
    """Other tokens there in every forward, and keys that are NaN: the same answer."""

    class Garbled(toys.Spy):
        def __call__(self, canvas: Canvas, query: Query, plan: Any) -> Any:
            assert query.hidden is not None
            garbage = (canvas.ids * 7 + canvas.columns()) % (toys.VOCAB - 1)
            if plan.cache.slots is not None and inner != "sparse":  # which drops slots of its own
                for buffer in plan.cache.slots.keys + plan.cache.slots.values:
                    buffer[query.hidden] = 1e30
            return super().__call__(replace(canvas, ids=torch.where(query.hidden, garbage, canvas.ids)), query, plan)

    for cache in (DPAD, STREAMING):
        plugins = {"scheduler": RULE, "blocks": {"name": "fixed", "length": BLOCK}, "stop": "none"}
        plugins |= {"cache": {**cache, "inner": inner}}
        found = [
            Sampler(spy(toys.denoiser(kind)), **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
            for spy in (toys.Spy, Garbled)
        ]
        assert torch.equal(found[0].tokens, found[1].tokens)
        assert torch.equal(found[0].trace.logprob, found[1].trace.logprob)


@few("inner", ["none", "prefix", "dual"])
def test_forwards_compute_the_spec_s_rows(inner: str) -> None:
    """Up to the block's end and what is kept; then block and kept, or the block alone. The set lasts for the block."""
    for cache in (DPAD, STREAMING):
        spy, result = answer(cache={**cache, "inner": inner})
        before: dict[tuple[int, int], set[int]] = {}
        for canvas, _, plan in spy.calls:
            for row, columns in enumerate(toys.columns(plan)):
                if canvas.done[row]:
                    continue
                start, stop = int(canvas.start[row]), int(canvas.stop[row])
                opens, behind = int(canvas.age[row]) == 0, {at for at in columns if at >= stop}
                first = 0 if opens or inner == "none" else start
                if inner == "dual" and not opens:
                    assert behind == set()
                else:
                    assert behind == before.setdefault((row, start), behind)
                assert columns == [*range(first, stop), *sorted(behind)]
        _, whole = answer(cache=inner)
        if inner != "dual":
            assert (result.trace.rows / result.nfe < whole.trace.rows / whole.nfe).all()


def test_given_tokens_behind_the_block_are_seen() -> None:
    canvas = opened(12, 0, 3)
    masked = canvas.masked.clone()
    masked[0, 9] = False
    cache = DPadCache(NoCache(), scale=0.0)
    assert kept(cache, replace(canvas, masked=masked)) == [[9]]


def test_a_block_that_is_shortened_keeps_what_its_first_forward_took_for_it() -> None:
    blocks = {"name": "adablock", "delimiters": list(range(20)), "threshold": 0.0, "length": 6, "window": 0.3}
    spy, _ = answer(cache={"name": "streaming", "inner": "dual", "window": 1, "tail": 0}, blocks=blocks)
    shortened = 0
    for (before, _, _), (after, query, _) in zip(spy.calls, spy.calls[1:], strict=False):
        same = (after.start == before.start) & (after.age == 1) & ~after.done
        taken = (after.columns() >= after.stop[:, None]) & (after.columns() < before.stop[:, None])
        assert query.hidden is not None
        assert not (query.hidden & taken)[same].any()
        shortened += int((taken & same[:, None]).any())
    assert shortened > 0


@few("inner", ["none", "prefix", "dual"])
def test_open_blocks_are_seen_whole(inner: str) -> None:
    """Of several open blocks, the ones that open later were behind the others."""
    blocks = {"name": "multi_block", "length": 4}
    spy, found = answer(cache={"name": "streaming", "inner": inner, "window": 0, "tail": 0}, blocks=blocks)
    assert found.complete.all()
    grew = 0
    for (before, old, _), (after, query, _) in zip(spy.calls, spy.calls[1:], strict=False):
        assert query.hidden is not None and old.hidden is not None
        assert not (query.hidden & after.in_block())[~after.done].any()
        came = old.hidden & ~query.hidden & (before.start == after.start)[:, None]
        grew += int((came & after.in_block() & ~before.in_block()).any())
    assert grew > 0


@pytest.mark.slow
@few("inner", ["threshold", "streaming"])
def test_drafts_see_what_the_inner_scheduler_sees(inner: str) -> None:
    """FreeDave is lossless under them too."""
    for cache in (DPAD | {"inner": "dual"}, STREAMING):
        rule = {"name": inner, "threshold": 0.6}
        _, plain = answer(cache=cache, scheduler=rule)
        _, drafted = answer(cache=cache, scheduler={"name": "freedave", "inner": rule})
        assert torch.equal(plain.tokens, drafted.tokens)
        assert drafted.nfe.sum() < plain.nfe.sum()


# Which columns stay


def test_a_window_and_the_last_column() -> None:
    canvas = opened(12, 2, 5)
    for window, tail, wanted in ((0, 1, [11]), (3, 1, [5, 6, 7, 11]), (6, 1, [*range(5, 12)]), (2, 0, [5, 6])):
        assert kept(StreamingCache(NoCache(), window, tail), canvas) == [wanted]


def test_gaussian_keeps_a_distance_as_often_as_it_should() -> None:
    rows, window, sigma, scale = 4000, 12, 3.0, 2.7
    canvas = opened(20, 2, 4, rows, seeds=torch.arange(rows))
    cache = DPadCache(NoCache(), window=window, sigma=sigma, scale=scale)
    live = cache.init(canvas, toys.denoiser().spec)
    shares = live.computes(canvas)[:, 4:20].double().mean(0).tolist()
    for distance, share in enumerate(shares):
        x = sigma * distance / (window - 1)
        odds = min(1.0, scale / sqrt(2 * pi) * exp(-x * x / 2)) if distance < window else 0.0
        assert abs(share - odds) <= 4 * sqrt(odds * (1 - odds) / rows), distance


def test_uniform_keeps_a_number_of_the_first_ones() -> None:
    rows, window, number = 3000, 6, 2
    canvas = opened(14, 2, 4, rows, seeds=torch.arange(rows))
    found = kept(DPadCache(NoCache(), "uniform", window, number=number), canvas)
    assert all(len(row) == number and max(row) < 4 + window for row in found)
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=14)[4:10]
    assert ((counts - rows * number / window).abs() < 5 * sqrt(rows * number / window)).all()
    assert kept(DPadCache(NoCache(), "uniform", 2, number=10), opened(14, 2, 4)) == [[*range(4, 14)]]
    assert kept(DPadCache(NoCache(), "uniform", 6, number=0), opened(14, 2, 4)) == [[]]


def test_even_spreads_what_gaussian_keeps_on_average() -> None:
    canvas = opened(300, 2, 4)
    (columns,) = kept(DPadCache(NoCache(), "even", 256, 4.0, 2.0), canvas)
    odds = [0.8 * exp(-((4 * d / 255) ** 2) / 2) for d in range(256)]
    assert abs(len(columns) - sum(odds)) < 1
    assert (
        columns
        == kept(DPadCache(NoCache(), "even", 256, 4.0, 2.0), canvas.with_layout(seeds=canvas.layout.seeds + 1))[0]
    )
    assert columns[:7] == [5, 6, 7, 9, 10, 11, 12]  # nearly 0.8 each: the first is missing, and one of five
    gaps = torch.tensor(columns).diff()
    assert gaps[:20].max() <= 2 < gaps[-5:].max()


def test_draws_belong_to_seed_and_block() -> None:
    cache, canvas = DPadCache(NoCache(), window=40), opened(60, 2, 5)
    found = kept(cache, canvas)
    assert found == kept(cache, replace(canvas, step=canvas.step + 9))
    assert found != kept(cache, canvas.with_layout(seeds=canvas.layout.seeds + 1))
    assert found != kept(cache, replace(canvas, start=canvas.start + 1))


# Streaming's threshold


def test_the_threshold_falls_with_the_masks_that_are_seen() -> None:
    rule, canvas = StreamingThreshold(0.9, 0.4), opened(12, 0, 4, 3)
    masked = canvas.masked.clone()
    masked[1, :2] = masked[2, :4] = False
    canvas, hidden = replace(canvas, masked=masked), torch.zeros_like(masked)
    hidden[:, 6:] = True
    shares = [1, 4 / 6, 2 / 6]
    query = replace(Query.window(canvas), hidden=hidden)
    assert rule.falling(canvas, query).tolist() == [0.9 * (1 - 0.4 * (1 - share)) for share in shares]
    assert rule.falling(canvas, Query.window(canvas)).tolist() == [
        0.9 * (1 - 0.4 * (1 - share)) for share in (1, 10 / 12, 8 / 12)
    ]


@pytest.mark.slow
def test_the_threshold_stays_between_its_ends_and_is_plain_at_first() -> None:
    seen: list[float] = []

    class Noted(StreamingThreshold):
        def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> Any:
            least = self.falling(canvas, query)
            assert (least[(canvas.age == 0) & ~canvas.done] == 0.7).all()
            seen.extend(least[~canvas.done].tolist())
            return super().tell(canvas, query, readout, carry)

    _, plain = answer(cache=STREAMING)
    _, same = answer(cache=STREAMING, scheduler=StreamingThreshold(0.8, 0.0))
    assert torch.equal(plain.tokens, same.tokens) and torch.equal(plain.trace.generated, same.trace.generated)
    answer(cache=STREAMING, scheduler=Noted(0.7, 0.5))
    assert min(seen) >= 0.35 - 1e-12 and max(seen) == 0.7 and min(seen) < 0.6


def test_a_block_causal_model_sees_no_masks_behind_the_block() -> None:
    sampler = toys.sampler("causal", scheduler={"name": "streaming", "threshold": 0.8, "alpha": 0.5})
    rule, canvas = sampler.plugins.scheduler, opened(12, 0, 4)
    assert isinstance(rule, StreamingThreshold)
    masked = canvas.masked.clone()
    masked[0, :2] = False
    assert rule.falling(replace(canvas, masked=masked), Query.window(canvas)).tolist() == [0.8 * 0.75]


# Refusals


@each(
    ("plugins", "said"),
    [
        ({"scheduler": "wino"}, "cache-incompatible: scheduler=wino, cache=dpad"),
        ({"scheduler": {"name": "freedave", "eager": True}}, "cache-incompatible: scheduler.eager, cache=dpad"),
        ({"stop": "prophet"}, "plugins-incompatible: stop=prophet, cache=dpad"),
        ({"kind": "causal"}, "cache-incompatible: cache=dpad"),
        ({"cache": {"name": "dpad", "inner": "dkv_greedy"}}, "cache-incompatible: cache.inner to prefix"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plugins: dict[str, Any], said: str) -> None:
    with refused(said):
        toys.sampler(**{"cache": "dpad", **plugins})


def test_a_model_of_whole_rows_is_refused() -> None:
    context = toys.context(replace(toys.denoiser().spec, cacheable=False))
    with refused("cache-incompatible: cache=dpad"):
        DPadCache().bind(context)


@each("inner", ["dllm", "elastic", "d2", "dkv_greedy", "dpad", "streaming", "block_causal"])
def test_caches_that_serve_what_a_block_did_not_compute_are_refused_inside(inner: str) -> None:
    with refused(f"cache-incompatible: cache=streaming, cache.inner={inner}"):
        toys.sampler(cache={"name": "streaming", "inner": inner}, scheduler="random_order")


def test_of_two_caches_that_hide_masks_both_are_named() -> None:
    said = "cache-incompatible: cache=dpad, cache.inner=streaming"
    with refused(said):
        toys.sampler(cache={"name": "dpad", "inner": "streaming"})


@few("inner", ["none", "exact", "prefix", "dual", "periodic_dual", "vicinity", "trailing", "dkv"])
def test_others_run_inside(inner: str) -> None:
    _, found = answer(cache={"name": "dpad", "inner": inner, "window": 6}, kind="dream")
    assert found.complete.all()


def test_an_inner_cache_is_one() -> None:
    with refused("option-type: cache.inner"):
        DPadCache("dual")  # pyright: ignore[reportArgumentType]
    made = config.build("cache", {"name": "dpad", "inner": {"name": "periodic_dual", "every": 3}})
    assert isinstance(made, DPadCache) and made.inner == PeriodicDual(3)


# A cache around another one hands on all that the contract of caches has, also what that gains later


DRIVES = {"layer", "cost"}  # asked of the plan's cache, the inner one
ITS_OWN = {"bind", "init", "computes", "narrow"}  # more than the inner one's
METHODS = [name for name, one in vars(Cache).items() if inspect.isfunction(one) and not name.startswith("_")]


@each("method", [name for name in METHODS if name not in DRIVES | ITS_OWN])
def test_it_hands_on_what_the_contract_of_caches_has(method: str) -> None:
    inner = MagicMock(spec=Cache)
    given = [object() for _ in list(inspect.signature(getattr(Cache, method)).parameters)[1:]]
    assert getattr(DPadCache(inner), method)(*given) in (getattr(inner, method).return_value, None)
    getattr(inner, method).assert_called_once_with(*given)


def test_it_says_what_the_cache_inside_says() -> None:
    facts = {name for name, hint in get_type_hints(Cache).items() if get_origin(hint) is ClassVar}
    properties = {name for name, one in vars(Cache).items() if isinstance(one, property)}
    inner = MagicMock(spec=Cache, **{name: object() for name in facts | properties})
    for name in sorted(facts | properties):
        assert getattr(DPadCache(inner), name) is getattr(inner, name), name


def test_it_hides_more_than_the_query_does() -> None:
    canvas = replace(toys.canvas(torch.ones(1, 12, dtype=torch.bool)), stop=torch.tensor([3]))
    live, query = DPadCache(NoCache(), scale=0.0).init(canvas, toys.denoiser().spec), Query.masks(canvas)
    computed = live.computes(canvas)
    assert computed is not None
    hidden = canvas.columns().expand_as(canvas.masked) == 1
    for before, wanted in ((None, [*range(3, 12)]), (hidden, [1, *range(3, 12)])):
        narrowed = live.narrow(canvas, replace(query, hidden=before), computed)
        assert narrowed.hidden is not None and narrowed.hidden[0].nonzero()[:, 0].tolist() == wanted
