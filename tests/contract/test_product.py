"""Every scheduler under every blocks, stop and cache: it runs and ends, or is refused by naming both and a way out."""

import functools
import re
from itertools import product
from typing import Any

import pytest

from dllm_sampler import Scheduler, UserError, config
from dllm_sampler.cache.base import BaseCache
from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Cache, Foresees, Stop
from dllm_sampler.core.spec import (
    AllColumns,
    BlocksOpenedAhead,
    CausalQueries,
    ChangingLength,
    HiddenMasks,
    PlannedCommits,
    SoftInputs,
    TrainedBlocks,
)
from tests import toys
from tests.contract import cases
from tests.refusals import refused
from tests.sampling import sample

TOKENS = 8
GROUPS = ("blocks", "stop", "cache")


@functools.cache
def built(group: str, kind: str = "llada") -> dict[str, Any]:
    """Each plug-in of a group under the first of its settings, of those that serve a kind of toy."""
    every = cases.settings(group)
    firsts = {name: next(one for one in every if one["name"] == name) for name in config.names(group)}
    # The caches of block-causal models have a toy and tests of their own: test_block_causal.
    made = {name: config.build(group, one) for name, one in firsts.items()}
    if kind in ("causal", "context"):
        return {name: one for name, one in made.items() if cases.legal(kind=kind, **{group: firsts[name]})}
    return {name: one for name, one in made.items() if not getattr(one, "causal", False) or group != "cache"}


def inside(cache: Cache) -> BaseCache:
    """Return the cache that computes and stores."""
    inner = cache.inner if isinstance(cache, SuffixCache) else cache
    assert isinstance(inner, BaseCache)
    return inner


def opposed(scheduler: Scheduler, blocks: Blocks, stop: Stop, cache: Cache) -> list[str]:
    """The plug-ins that a scheduler cannot work with, by what it declares."""
    traits = scheduler.traits
    trained, hidden = traits.find(TrainedBlocks), traits.find(HiddenMasks)
    wrong_blocks = trained is not None and blocks.lookahead(1000) != trained.length
    apart = traits.revises or traits.has(PlannedCommits) or traits.scheduled or trained is not None
    wrong_blocks = wrong_blocks or ((blocks.several or blocks.slides) and apart)
    starved = (traits.has(AllColumns) and cache.stores) or (
        isinstance(cache, Foresees) and not traits.has(PlannedCommits)
    )
    inner, hides = inside(cache), isinstance(cache, SuffixCache)
    starved = starved or (traits.needs_every_position and inner.chooses) or (traits.drafts and not inner.steady)
    starved = starved or (hidden is not None and hidden.horizon is not None and inner.keeps_noise)
    starved = starved or (hides and (traits.has(AllColumns) or traits.has(BlocksOpenedAhead)))
    soft = traits.has(SoftInputs) and inner.stores and (inner.uses_padded_plan or not inner.steady)
    starved = starved or soft
    moves = traits.has(ChangingLength)
    starved = starved or (moves and (hides or (inner.stores and not inner.supports_resize)))
    stops = (traits.drafts or moves) and (stop.cuts or stop.fills)
    wrong_blocks = wrong_blocks or (traits.has(CausalQueries) and blocks.sizes_on_open)
    wrong_blocks = wrong_blocks or (moves and (blocks.sizes_on_open or blocks.several or blocks.slides))
    against = {f"cache={named(cache)}": starved, f"blocks={named(blocks)}": wrong_blocks, f"stop={named(stop)}": stops}
    return [name for name, opposes in against.items() if opposes]


KINDS = {one.values[0]["name"] for one in cases.one_of_each_kind() if not one.marks}


@pytest.mark.parametrize("share", ["sample", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", config.names("scheduler"))
def test_every_combination_runs_or_is_refused(name: str, share: str) -> None:
    """Of blocks, stops and caches; a sample meets each of them, with one scheduler of each kind, and an eighth of it
    goes with the others. The plainest ones go with every scheduler."""
    kind = cases.toy_for({"name": name})
    every, context, ran = list(product(*(built(group, kind) for group in GROUPS))), toys.context(kind=kind), 0
    plain = ("fixed" if kind == "causal" else "full", "none", "none")
    some = [plain, *sample(every, enumerate, seed=name)]
    for turn, chosen in enumerate(every if share == "all" else some):
        if share == "sample" and name not in KINDS and ran and 8 * turn >= len(some):
            break
        plugins = {group: built(group, kind)[one] for group, one in zip(GROUPS, chosen, strict=True)}
        scheduler = built("scheduler")[name]
        assert isinstance(scheduler, Scheduler)
        rule, cache, stop = scheduler.bind(context), plugins["cache"].bind(context), plugins["stop"]
        if stop.judges_all and isinstance(cache, SuffixCache):  # whatever the scheduler
            with refused("plugins-incompatible: stop=, cache="):
                toys.sampler(stop=stop, cache=cache)
            continue
        against = opposed(rule, plugins["blocks"], plugins["stop"], cache)
        if (plugins["blocks"].several or plugins["blocks"].slides) and chosen[1] == "block":  # whatever the scheduler
            with refused(f"stop-incompatible: stop=block, blocks={chosen[0]}, stop=prefix"):
                toys.sampler(**plugins)
            continue
        if plugins["blocks"].slides and (inside(cache).refreshes or isinstance(cache, SuffixCache)):
            with refused(f"cache-incompatible: cache={chosen[2]}, blocks=sliding, cache=sliding"):
                toys.sampler(**plugins)
            continue
        if plugins["blocks"].hides and inside(cache).keeps_noise:  # whatever the scheduler
            with refused(f"cache-incompatible: cache={chosen[2]}"):
                toys.sampler(**plugins)
            continue
        if against:
            with pytest.raises(UserError) as refusal:
                toys.sampler(kind, scheduler=scheduler, **plugins)
            sentence = str(refusal.value)
            assert f"scheduler={named(scheduler)}" in sentence, chosen
            assert any(other in sentence for other in against), chosen
            assert re.search("[:.] [Uu]se ", sentence) and "\n" not in sentence, chosen
            continue
        sampler = toys.sampler(kind, scheduler=scheduler, **plugins)
        *_, last = sampler.stream([toys.PROMPTS[0]], max_new_tokens=TOKENS, seed=3)
        assert last.result is not None
        assert last.result.complete.all(), chosen
        assert not (last.result.tokens == toys.MASK).any(), chosen
        assert int(last.result.nfe) <= sampler.plugins.scheduler.bound(TOKENS), chosen
        if chosen[1] == "none" and not plugins["blocks"].hides:  # these end rows themselves
            assert not last.masked.any(), chosen
        ran += 1
    assert ran > 0
