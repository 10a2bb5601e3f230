"""FreeDave (arXiv 2510.00294) and SSD (arXiv 2510.04147): the scheduler inside, in fewer forwards."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.core import packing
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.values import Query
from dllm_sampler.schedulers.drafting.pace import Pace
from dllm_sampler.schedulers.freedave import FreeDave
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, sampled
from tests.tables.drafting import same_path

TOKENS, BLOCK = 18, 6
Settings = dict[str, Any]
BASES: dict[str, Settings] = {
    "fixed": {"name": "fixed"},
    "two": {"name": "fixed", "steps": 9, "score": "margin"},
    "threshold": {"name": "threshold", "threshold": 0.6},
    "credit": {"name": "credit", "threshold": 0.7},
    "klass": {"name": "klass", "threshold": 0.3, "divergence": 1.0},
}


def run(scheduler: Settings, toy: str = "llada", prompts: list[list[int]] = toys.PROMPTS, **plugins: Any) -> Result:
    sampler = toys.sampler(toy, scheduler=scheduler, **plugins)
    return sampler.generate(prompts, max_new_tokens=TOKENS, seed=list(range(len(prompts))))


def random_prompts(seed: int, count: int = 4) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(toys.EOS) for _ in range(random.randint(1, 9))] for _ in range(count)]


@pytest.mark.parametrize(("toy", "base"), crossed(toys.TOYS, list(BASES), together=0))
def test_tokens_and_states_are_those_of_the_scheduler_inside(toy: str, base: str) -> None:
    """FreeDave's invariants 1, 4 and 7, SSD's 1 and 4; `python -m tests.tables.drafting` has many more prompts."""
    turn = list(BASES).index(base) + toys.TOYS.index(toy)
    cache, draft, prompts = ("none", "prefix", "dual")[turn % 3], 3 + turn % 4, random_prompts(turn)
    alone = run(BASES[base], toy, prompts, cache=cache)
    chain = {"name": "freedave", "inner": BASES[base], "draft": draft}
    freedave = run(chain, toy, prompts, cache=cache)
    ssd = {"name": "ssd", "inner": BASES[base], "length": draft - 1}
    speculative = run(ssd, toy, prompts, cache=cache)
    tree = run({**ssd, "width": 3}, toy, prompts, cache=cache)
    for drafted in (freedave, speculative, tree):
        assert same_path(alone, drafted).all()
        torch.testing.assert_close(drafted.trace.logprob, alone.trace.logprob, atol=1e-6, rtol=1e-6)
    assert torch.equal(speculative.trace.generated, freedave.trace.generated)
    assert torch.equal(speculative.trace.rows, freedave.trace.rows)


@pytest.mark.slow
@pytest.mark.parametrize(("store", "base"), crossed(["ride", "separate"], list(BASES), together=0))
def test_block_causal_models_too(store: str, base: str) -> None:
    """The rows of a batch stand at different phases of their blocks: some store while others draft."""
    temperature = 0.8 if len(base) % 2 else None
    options: Settings = {
        "temperature": temperature,
        "cache": {"name": "block_causal", "store_pass": store},
        "prompts": random_prompts(len(base)),
    }
    options["blocks"] = {"name": "fixed", "length": 8}
    alone = run(BASES[base], "causal", **options)
    for draft in ({"name": "freedave", "draft": 4}, {"name": "ssd", "width": 2}):
        drafted = run({**draft, "inner": BASES[base]}, "causal", **options)
        assert same_path(alone, drafted).all()
        assert (drafted.nfe <= alone.nfe).all()
        assert drafted.nfe.sum() < alone.nfe.sum() or base != "fixed"


@pytest.mark.slow
def test_one_branch_is_the_scheduler_inside() -> None:
    """FreeDave's invariant 2, SSD's 2."""
    for one in ({"name": "freedave", "draft": 1}, {"name": "ssd", "length": 0}):
        for base in list(BASES.values())[::4]:
            drafted, alone = run({**one, "inner": base}, cache="dual"), run(base, cache="dual")
            assert torch.equal(drafted.trace.generated, alone.trace.generated)
            assert torch.equal(drafted.trace.rows, alone.trace.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide", sampled([{"name": "temperature", "value": 0.5}, {"name": "top_k", "k": 3, "measured": True}])
)
def test_sampling_is_exact_too(guide: Settings) -> None:
    for base in ({"name": "fixed"}, {"name": "threshold", "threshold": 0.6}, {"name": "fixed", "score": "random"}):
        options = {"guide": guide, "temperature": 0.8, "cache": "prefix"}
        alone = run(base, **options)
        after = run({"name": "freedave", "inner": base, "draft": 5}, **options)
        assert same_path(alone, after).all()
        assert after.nfe.sum() < alone.nfe.sum()


@pytest.mark.slow
def test_more_branches_save_more_forwards() -> None:
    """FreeDave's invariant 3. No theorem for a single row: a longer step may end where drafts are worse."""
    prompts = random_prompts(5, 12)
    forwards = [int(run({"name": "freedave", "draft": d}, prompts=prompts).nfe.sum()) for d in (1, 2, 4, 6)]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[-1] < 0.85 * forwards[0]
    swaps = {"name": "ssd", "length": 5, "width": 3}
    assert int(run(swaps, prompts=prompts).nfe.sum()) < forwards[-1]


@pytest.mark.slow
@pytest.mark.parametrize("length", sampled([2, 4, 18]))
def test_eager_drafts_cross_the_edge(length: int) -> None:
    for base, toy in (("fixed", "llada"), ("threshold", "dream")):
        options: Settings = {"blocks": {"name": "fixed", "length": length}}
        drafts = [{"name": "freedave", "inner": BASES[base], "draft": 5, "eager": eager} for eager in (False, True)]
        alone = run(BASES[base], toy, **options)
        waits, eager = (run(draft, toy, **options) for draft in drafts)
        assert same_path(alone, eager).all()
        assert eager.nfe.sum() < waits.nfe.sum() or length == TOKENS


REFUSED: dict[str, tuple[Settings, str]] = {
    "takes back": ({"scheduler": {"name": "freedave", "inner": "wino"}}, "scheduler-incompatible: scheduler=freedave"),
    "asks": ({"scheduler": {"name": "ssd", "inner": "slowfast"}}, "scheduler-incompatible: scheduler.inner=slowfast"),
    "twice": ({"scheduler": {"name": "ssd", "inner": "freedave"}}, "scheduler-incompatible: scheduler=ssd"),
    "outside": ({"scheduler": {"name": "eoser", "inner": "freedave"}}, "scheduler-incompatible: scheduler=eoser"),
    "cache": ({"cache": "periodic_dual"}, "cache-incompatible: cache=dual"),
    "stop": ({"stop": "prophet"}, "plugins-incompatible: stop=prefix"),
    "cut": ({"stop": "truncate"}, "plugins-incompatible: stop=prefix"),
    "edge": (
        {"scheduler": {"name": "freedave", "eager": True}, "cache": "dual"},
        "cache-incompatible: scheduler.eager=false",
    ),
    "with_exact_sizes": (
        {"scheduler": {"name": "freedave", "eager": True}, "blocks": "adablock"},
        "scheduler-incompatible: blocks=fixed",
    ),
    "none": ({"scheduler": {"name": "freedave", "draft": 0}}, "option-range: scheduler.draft"),
    "inner": ({"scheduler": {"name": "freedave", "inner": "treshold"}}, "choice-unknown: 'threshold'"),
}


@each("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    plugins, sentence = REFUSED[name]
    with refused(sentence) as refusal:
        toys.sampler(**{"scheduler": "freedave", **plugins})
    assert "\n" not in str(refusal.value)


def test_noise_in_the_order_of_steps_is_refused() -> None:
    sampler = toys.sampler(scheduler="freedave", noise=ReplayNoise(0, "llada"), temperature=1.0)
    with refused("scheduler-incompatible: scheduler=freedave"):
        sampler.generate([[3]], max_new_tokens=4)


def test_the_pace_grows_while_branches_are_free() -> None:
    canvas = toys.canvas(torch.ones(1, 32, dtype=torch.bool))
    block = packing.with_exact_sizes(canvas, toys.wanted(canvas, Query.masks(canvas), toys.denoiser().spec))

    def settle(seconds: dict[int, float]) -> list[int]:
        pace, asked = Pace(most=8, tries=2), [1]
        for _ in range(12):
            sizes = block.sizes._replace(opens=False)
            asked.append(pace.next(replace(block, sizes=sizes, most_candidates=asked[-1]), seconds[asked[-1]]))
        return asked

    assert settle({1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2})[-1] == 8
    assert settle({1: 1.0, 2: 1.1, 4: 2.0, 8: 4.0})[-1] == 2
    assert settle({1: 1.0, 2: 1.9})[-1] == 1


@pytest.mark.slow
def test_auto_changes_no_token() -> None:
    scheduler = toys.sampler(scheduler={"name": "freedave", "draft": "auto"})
    alone = run({"name": "fixed"})
    for _ in range(3):  # it goes on learning
        drafted = scheduler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=list(range(len(toys.PROMPTS))))
        assert same_path(alone, drafted).all()
    plugin = scheduler.plugins.scheduler
    assert isinstance(plugin, FreeDave)
    assert max(max(table) for table in plugin.measured.tables.values()) > 1


@pytest.mark.slow
def test_mini_needs_fewer_forwards() -> None:
    prompts = ["reverse : red blue green", "copy : red blue", "2 + 3 + 4 ="]
    alone, drafted = (
        Sampler.from_pretrained("mini", dtype="float64", scheduler=scheduler, cache="dual", stop="none")
        for scheduler in ("fixed", {"name": "freedave", "draft": 8})
    )
    one, two = (sampler.generate(prompts, max_new_tokens=32) for sampler in (alone, drafted))
    assert same_path(one, two).all()
    assert two.nfe.sum() < 0.5 * one.nfe.sum(), "on average a forward commits more than two positions"
