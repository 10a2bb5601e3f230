"""dLLM-Cache (arXiv 2506.06295): its settings at their ends, what a forward really computes, and guidance."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.cache.dllm_cache import IntervalCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.engine import layout
from dllm_sampler.engine.loop import Engine
from dllm_sampler.models.loading import load
from dllm_sampler.models.transformer import SwiGLU
from dllm_sampler.published import PublishedFixedSteps
from tests import tiny, toys
from tests.refusals import refused
from tests.sampling import crossed, each, few

TOKENS = 16
LAYERS = 2
PARALLEL = {"name": "threshold", "threshold": 0.6}


def run(cache: Any, kind: str = "llada", prompts: list[list[int]] = toys.PROMPTS, **plugins: Any) -> Result:
    sampler = toys.sampler(kind, cache=cache, **{"scheduler": PARALLEL, **plugins})
    return sampler.generate(prompts, max_new_tokens=TOKENS)


def assert_same(one: Result, two: Result) -> None:
    for name in ("ids", "step_map", "nfe"):
        assert torch.equal(getattr(one.trace, name), getattr(two.trace, name)), name
    torch.testing.assert_close(one.trace.logprob, two.trace.logprob, rtol=1e-6, atol=1e-9)


def differ(one: Result, two: Result) -> bool:
    return bool((one.trace.logprob - two.trace.logprob).abs().amax() > 1e-3)


@contextmanager
def fed() -> Iterator[list[int]]:
    """Rows that went through a feed-forward, one entry per layer and forward."""
    rows: list[int] = []
    forward = SwiGLU.forward

    def noted(self: SwiGLU, hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[1])
        return forward(self, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwiGLU, "forward", noted)
        yield rows


def steps(number: int) -> dict[str, Any]:
    return {"scheduler": {"name": "fixed", "steps": number}, "blocks": "full"}


@pytest.mark.slow
@few("kind", toys.TOYS)
def test_refreshed_in_every_forward_it_is_no_cache(kind: str) -> None:
    plain = run("none", kind)
    for ratio in (0.0, 0.5):
        cached = run(IntervalCache(1, 1, ratio), kind)
        assert_same(cached, plain)
        assert torch.equal(cached.trace.rows, plain.trace.rows)


@few("kind", toys.TOYS)
def test_the_whole_response_computed_by_choice_or_by_interval(kind: str) -> None:
    by_interval, by_choice = run(IntervalCache(6, 1, 0.0), kind), run(IntervalCache(6, 4, 1.0), kind)
    if kind == "dream":  # the row that predicts the first token is one more than the share counts
        by_choice = run(IntervalCache(6, 1, 1.0), kind)
    assert_same(by_choice, by_interval)
    assert differ(by_interval, run("none", kind)), "the prompt was not frozen"


def test_without_a_share_nothing_is_computed_in_between() -> None:
    prompt = toys.PROMPTS[1]
    with fed() as rows:
        result = run(
            IntervalCache(5, 3, 0.0), prompts=[prompt], scheduler={"name": "fixed", "steps": 10}, blocks="full"
        )
    forwards, at = [], iter(rows)
    for number in range(10):
        first, later = next(at), (len(prompt) if number % 5 == 0 else 0) + (TOKENS if number % 3 == 0 else 0)
        assert first == len(prompt) + TOKENS  # the first layer is always computed
        assert later == 0 or next(at) == later
        forwards.append(first + later)
    assert not list(at)
    assert int(result.trace.rows[0]) == sum((rows + LAYERS - 1) // LAYERS for rows in forwards)
    assert differ(result, run(IntervalCache(5, 3, 0.25), prompts=[prompt], **steps(10)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), crossed(["gqa", "llada"], [3, 8], together=0))
def test_rows_that_did_not_change_are_alike(kind: str, every: int) -> None:
    """A schedule with more steps than tokens repeats forwards: rounding, which a batch changes, decides nothing."""
    rule = PublishedFixedSteps(40, "entropy")
    cache = {"name": "dllm", "prompt_every": 2 * every, "response_every": every}
    it = toys.sampler(kind, cache=cache, blocks="ascending", scheduler=rule)
    batch = it.generate(toys.PROMPTS, max_new_tokens=18, seed=toys.SEEDS).trace
    for row, prompt in enumerate(toys.PROMPTS):
        alone = it.generate(prompt, max_new_tokens=18, seed=toys.SEEDS[row]).trace
        assert torch.equal(alone.generated[0], batch.generated[row])
        assert torch.allclose(alone.logprob[0, -18:], batch.logprob[row, -18:], rtol=0, atol=1e-12)


@each("scheduler", ["rcr", {"name": "hierarchical", "low": 0.2, "threshold": 0.8, "remask": 0.4}])
def test_what_is_taken_back_or_replaced_is_computed_in_every_layer(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Tensor] = []
    due = IntervalCache._due  # pyright: ignore[reportPrivateUsage]

    def noted(self: IntervalCache, index: int, *args: Any) -> Tensor | None:
        at = due(self, index, *args)
        if index:
            assert at is not None
            chosen.append(at)
        return at

    monkeypatch.setattr(IntervalCache, "_due", noted)
    sampler = toys.sampler(cache=IntervalCache(100, 100, 0.5), scheduler=scheduler, blocks="full")
    spec, blocks = sampler.denoiser.spec, sampler.plugins.blocks
    start = layout.canvas(toys.PROMPTS, TOKENS, toys.SEEDS, spec, blocks, CounterNoise(), False)
    before, touched, seen = start, None, 0
    for state in Engine(sampler.denoiser, sampler.plugins).run(start, 40):
        at = torch.zeros_like(start.masked).scatter(1, chosen[-1], True)
        if touched is not None:
            few = touched.sum(1, keepdim=True) <= 8  # as many as the share holds
            assert not (touched & few & ~at).any()
            seen += int((touched & few).sum())
        after = state.canvas
        touched = ~before.masked & (after.masked | (after.ids != before.ids)) & ~after.done[:, None]
        before = after
    assert seen > 0


@each(
    ("settings", "says"),
    [
        ({"prompt_every": 0}, "option-range: cache.prompt_every"),
        ({"response_every": -3}, "option-range: cache.response_every"),
        ({"guidance_every": 0}, "option-range: cache.guidance_every"),
        ({"ratio": 1.5}, "option-range: cache.ratio"),
    ],
)
def test_mistakes_are_one_sentence(settings: dict[str, Any], says: str) -> None:
    with refused(says):
        toys.sampler(cache={"name": "dllm", **settings})


@pytest.mark.slow
def test_masks_that_change_equally_are_chosen_by_position(tmp_path: Path) -> None:
    """On this model the attention of masks hardly depends on their positions: rounding would order them."""
    loaded = load(tiny.write("llada-moe", tmp_path / "model"), dtype="float64")
    cache = {"name": "dllm", "prompt_every": 4, "response_every": 4, "ratio": 0.8}
    sampler = Sampler(
        loaded.denoiser, scheduler="fixed", blocks={"name": "fixed", "length": 16}, stop="none", cache=cache
    )
    prompts = [[0, 26, 12, 2, 9, 34, 26, 24, 13, 25, 8], [8, 0, 3, 6]]
    batch, alone = (sampler.generate(given, max_new_tokens=22).trace for given in (prompts, prompts[:1]))
    parts = batch.logprob[0, batch.origin :], alone.logprob[0, alone.origin :]
    torch.testing.assert_close(*parts, atol=1e-12, rtol=1e-12)
