"""Published code as plug-ins: rows of a batch, and what is refused. That each is the published loop the traces say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_sampler import config
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.published import (
    AnyBlock,
    CappedEntropyBound,
    EvenRest,
    ForcedFirst,
    PublishedCredit,
    PublishedDInferThreshold,
    PublishedDualCache,
    PublishedElasticCache,
    PublishedFactor,
    PublishedFixedSteps,
    PublishedFreeDave,
    PublishedKlass,
    PublishedLocalLeap,
    PublishedParallelDecoding,
    PublishedPositionCalibrated,
    PublishedPrefixCache,
    PublishedRunningConfidence,
    PublishedSlowFast,
    PublishedSparseCache,
    PublishedWino,
    Unrolled,
)
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed
from tests.scripted import PROMPTS, TOKENS, run, sampler
from tests.unit.test_cache_elastic import Paper, decodes_as

ALL: list[Scheduler] = [
    ForcedFirst(Threshold(0.6)),
    Unrolled(Threshold(0.6), tpf=2, maximum=3),
    Unrolled(Threshold(0.6), tpf=2, maximum=3, cached=True, every=2),
    PublishedDInferThreshold(0.6),
    PublishedCredit(0.6),
    PublishedWino(0.3),
    PublishedSlowFast(0.6, slow=3, sigma=3.0),
    PublishedLocalLeap(0.6, 0.3),
    PublishedParallelDecoding(verifier=toys.verifier()),
    PublishedRunningConfidence(9),
    PublishedFreeDave(Threshold(0.6), match="subset"),
    PublishedFixedSteps(30, "margin"),
    PublishedFactor(0.7),
    PublishedKlass(9, threshold=0.2, divergence=0.5),
    PublishedPositionCalibrated(9),
    EvenRest(18, "entropy", "even"),
    CappedEntropyBound(0.5, "confidence", 4),
]


@pytest.mark.parametrize(("scheduler", "kind"), crossed(ALL, ["llada", "dream", "cfg"]))
def test_a_row_in_a_batch_is_the_row_alone(scheduler: Scheduler, kind: str) -> None:
    batch = run(scheduler, kind=kind)
    assert batch.complete.all()
    assert int(batch.nfe.max()) <= sampler(scheduler, kind).plugins.scheduler.bound(TOKENS)
    row = ALL.index(scheduler) % len(PROMPTS)
    check_row(batch, row, run(scheduler, [PROMPTS[row]], kind))


@pytest.mark.parametrize("name", ["tpf", "maximum"])
def test_unrolling_by_nothing_is_refused(name: str) -> None:
    with refused(f"option-range: scheduler.{name}"):
        Unrolled(Threshold(), **{name: 0})  # pyright: ignore[reportArgumentType]


def test_drafts_that_are_exact_are_not_published() -> None:
    with refused("options-conflict: scheduler.eager"):
        PublishedFreeDave(FixedSteps(), eager=True)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("rule", [PublishedKlass(), PublishedRunningConfidence(), AnyBlock()])
def test_what_works_on_all_blocks_needs_every_row(rule: Scheduler, cache: str) -> None:
    with refused("cache-incompatible: scheduler=, cache=none"):
        sampler(rule, cache=cache)


@pytest.mark.parametrize("cache", [PublishedPrefixCache(), PublishedDualCache(), PublishedSparseCache()])
def test_a_window_without_its_first_prediction_is_refused(cache: Any) -> None:
    """Under a logit shift, the published window predicts nothing for the block's first position."""
    with refused(f"cache-incompatible: cache={type(cache).__name__}, scheduler=threshold, ForcedFirst"):
        toys.sampler("dream", cache=cache, scheduler=Threshold())
    assert toys.sampler("dream", cache=cache, scheduler={"name": "eoser", "inner": ForcedFirst(Threshold())})
    assert toys.sampler("llada", cache=cache)  # no shift, no difference


@pytest.mark.parametrize("shift", [False, True])
def test_elastic_compares_over_heads(shift: bool) -> None:
    class OverHeads(Paper):
        def similarity(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            return torch.cosine_similarity(before, now, dim=0).mean()

    case: dict[str, Any] = {"gamma": 0.8, "window": 5}
    decodes_as(OverHeads, PublishedElasticCache(**case), case, shift)


@pytest.mark.parametrize("group", ["scheduler", "blocks", "stop", "cache", "guide"])
def test_a_quirk_is_no_option(group: str) -> None:
    for name in config.names(group):
        with refused(f"field-unknown: {group}={name}, 'compat'"):
            config.build(group, {"name": name, "compat": True})
