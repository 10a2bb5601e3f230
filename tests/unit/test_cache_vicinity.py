"""dInfer's vicinity refresh: its window, its warm-up, and the caches it becomes at its ends."""

from typing import Any

import pytest

from dllm_sampler import Result, Sampler
from dllm_sampler.cache.vicinity import VicinityCache
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, few
from tests.scripted import same

TOKENS, BLOCK = 17, 6


def run(cache: Any, kind: str = "llada") -> Result:
    sampler = toys.sampler(kind, scheduler={"name": "threshold", "threshold": 0.7}, cache=cache)
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


@few("kind", toys.TOYS)
def test_without_a_margin_it_is_the_dual_cache(kind: str) -> None:
    assert same(run(VicinityCache(before=0, after=0, warmup=0), kind), run("dual", kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache"),
    crossed(toys.TOYS, {"margin": VicinityCache(99, 99, 0), "warmup": VicinityCache(0, 0, 99)}, together=0),
)
def test_a_margin_or_a_warmup_that_never_ends_is_no_cache(kind: str, cache: VicinityCache) -> None:
    assert same(run(cache, kind), run("none", kind))
    assert not same(run("dual", kind), run("none", kind))


@each("kind", ["llada", "dream"])
def test_the_window(kind: str) -> None:
    """One prompt of three, blocks of six, two columns left, three right; two whole forwards, then one per block."""
    spy = toys.Spy(toys.denoiser(kind))
    blocks = {"name": "fixed", "length": BLOCK}
    cache = VicinityCache(before=2, after=3, warmup=2)
    result = Sampler(spy, scheduler="fixed", cache=cache, blocks=blocks, stop="none").generate(
        toys.PROMPTS[:1], max_new_tokens=12
    )
    columns = [toys.columns(plan)[0] for _, _, plan in spy.calls]
    whole, first, second = list(range(15)), list(range(1, 12)), list(range(7, 15))
    assert columns == [whole] * 2 + [first] * 4 + [whole] + [second] * 5
    assert int(result.trace.rows) == sum(map(len, columns))


def test_the_shift_has_a_column_before_the_block() -> None:
    spy = toys.Spy(toys.denoiser("dream"))
    blocks = {"name": "fixed", "length": BLOCK}
    cache = VicinityCache(before=0, after=0, warmup=0)
    Sampler(spy, scheduler="fixed", cache=cache, blocks=blocks, stop="none").generate(
        toys.PROMPTS[:1], max_new_tokens=6
    )
    assert toys.columns(spy.calls[1][2]) == [list(range(2, 9))]


@each("field", ["before", "after", "warmup"])
@each("value", [-1, 1.5, True])
def test_fields_are_whole_numbers(field: str, value: Any) -> None:
    with refused(f"option-range: cache.{field}"):
        VicinityCache(**{field: value})
