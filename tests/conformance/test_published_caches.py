"""Quirks of published caches: where their window begins, what they keep, how they compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dllm_sampler import Canvas, Sampler, UserError
from dllm_sampler.cache.dkv import DelayedCache
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.eval.conformance.published import (
    ForcedFirst,
    PublishedDelayedCache,
    PublishedDualCache,
    PublishedElasticCache,
    PublishedPrefixCache,
    PublishedSparseCache,
    PublishedWindow,
)
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.scripted import TOKENS
from tests.unit.test_cache_dkv import no_mask_misses_its_row
from tests.unit.test_cache_elastic import Paper, decodes_as


@pytest.mark.parametrize("cache", [PublishedPrefixCache(), PublishedDualCache(), PublishedSparseCache()])
def test_a_window_without_its_first_prediction_is_refused(cache: Any) -> None:
    """Under a logit shift, the published window predicts nothing for the block's first position."""
    message = rf"cache={type(cache).__name__} .* scheduler=Threshold .* use ForcedFirst"
    with pytest.raises(UserError, match=message):
        toys.sampler("dream", cache=cache, scheduler=Threshold())
    assert toys.sampler("dream", cache=cache, scheduler={"name": "eoser", "inner": ForcedFirst(Threshold())})
    assert toys.sampler("llada", cache=cache)  # no shift, no difference


@pytest.mark.parametrize(("cache", "first"), [(DualCache(), 2), (PublishedDualCache(), 3), (PublishedPrefixCache(), 3)])
def test_the_window_begins_with_the_block(cache: Any, first: int) -> None:
    spy = toys.Spy(toys.denoiser("dream"))
    blocks = {"name": "fixed", "length": 6}
    Sampler(spy, cache=cache, scheduler=ForcedFirst(Threshold(2.0)), blocks=blocks, stop="none").generate(
        [[5, 11, 3]], max_new_tokens=6
    )
    packs = [plan.pack for _, _, plan in spy.calls]
    assert [int(pack.column[0]) for pack in packs if pack is not None] == [0, *[first] * 5]


@dataclass
class LateDual(PublishedWindow, DualCache):
    """The published dual cache with one more whole forward per block."""

    def due(self, canvas: Canvas) -> torch.Tensor:
        return canvas.age <= 1


def test_the_window_begins_with_the_block_in_a_sparse_cache_too() -> None:
    def cached(cache: Any) -> Any:
        rule = ForcedFirst(Threshold(0.7))
        return toys.sampler("dream", cache=cache, scheduler=rule).generate(toys.PROMPTS, max_new_tokens=TOKENS)

    late = cached(LateDual())
    sparse = cached(PublishedSparseCache(keep=1.0))
    for name in ("ids", "step_map", "nfe", "rows"):
        assert torch.equal(getattr(sparse.trace, name), getattr(late.trace, name))


@pytest.mark.parametrize("mode", ["decode", "pd", "prefill"])
@pytest.mark.parametrize("shift", ["un", "un_right"])
def test_dkv_keeps_the_last_row_by_another_rule(shift: Any, mode: Any) -> None:
    """Which never leaves a mask without the row that predicts it."""
    published, clean = (
        [bool(live.kept[0, seen.end[0] - 1]) for seen, live in no_mask_misses_its_row(kind(3, mode, shift=shift))]
        for kind in (PublishedDelayedCache, DelayedCache)
    )
    assert published != clean


@pytest.mark.parametrize("shift", [False, True])
def test_elastic_compares_over_heads(shift: bool) -> None:
    class OverHeads(Paper):
        def similarity(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            return torch.cosine_similarity(before, now, dim=0).mean()

    case: dict[str, Any] = {"gamma": 0.8, "window": 5}
    decodes_as(OverHeads, PublishedElasticCache(**case), case, shift)
