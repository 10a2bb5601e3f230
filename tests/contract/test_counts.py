"""A schedule's share is one of all masks of a block, also under a cache that chooses which of them are predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as once
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from dllm_sampler import Canvas, Edit, Query, Readout, Result, Sampler, config
from dllm_sampler.core.protocols import Cache, Carry
from dllm_sampler.published import PublishedFixedSteps, PublishedPositionCalibrated
from dllm_sampler.schedulers.slowfast import SlowFast
from tests import toys
from tests.contract import cases
from tests.contract.cases import Settings
from tests.refusals import refused
from tests.sampling import crossed, sampled, sampled_rows

TOKENS = 17
WIDTH = {"elastic": "window", "d2": "masks"}  # the field that says how many masks are predicted
BLOCKS: dict[str, Settings] = {"full": {"name": "full"}, "fixed": {"name": "fixed", "length": 6}}
BAN = {"name": "end_tokens"}  # masks behind an end of text come last: test_masks_behind_an_end_of_text

# What each step commits hangs on no prediction.
FIXED: dict[str, Settings] = {
    "one per step": {"name": "fixed"},
    "fixed": {"name": "fixed", "steps": 12},
    "fixed, 7": {"name": "fixed", "steps": 7, "score": "margin"},
    "timestep": {"name": "fixed", "steps": 10, "schedule": "timestep", "score": "entropy"},
    "even": {"name": "fixed", "steps": 7, "schedule": "even", "score": "entropy"},
    "rounded": {"name": "fixed", "steps": 10, "schedule": "rounded"},
    "cosine": {"name": "fixed", "steps": 12, "schedule": "cosine"},
    "certainty": {"name": "certainty", "steps": 9},
    "pc": {"name": "pc", "steps": 11},
    "budgeted": {"name": "budgeted", "threshold": 0.0, "steps": 8},
    "eoser": {"name": "eoser", "inner": {"name": "fixed", "steps": 12}},
    "eoser around pc": {"name": "eoser", "inner": {"name": "pc", "steps": 10}},
    "eoser around certainty": {"name": "eoser", "inner": {"name": "certainty", "steps": 12}},
    "eoser around budgeted": {"name": "eoser", "inner": {"name": "budgeted", "threshold": 0.0, "steps": 10}},
    "ccd": {"name": "ccd", "dynamic": False, "steps": 12, "warmup": 1},
    "ccd_marginal": {"name": "ccd_marginal", "dynamic": False, "steps": 12},
    "klass": {"name": "klass", "divergence": 0.0, "steps": 12},
    "dynamic": {"name": "dynamic", "threshold": 1.0, "steps": 6},
    "block_refine": {"name": "block_refine", "threshold": 1.0, "steps": 6},
    "ascending": {"name": "ascending"},
}
# What they commit beyond their share does.
ADAPTIVE: dict[str, Settings] = {
    "ccd": {"name": "ccd", "steps": 9, "warmup": 1},
    "klass": {"name": "klass", "steps": 12, "threshold": 0.2, "divergence": 1.0},
    "klass, steadiest": {"name": "klass", "steps": 9, "history": 1, "divergence": 1.0, "take": "steadiest"},
    "klass, surest": {"name": "klass", "steps": 6, "history": 1, "divergence": 9.0, "threshold": 0.1, "take": "surest"},
}


def cache_of(settings: Settings) -> Cache:
    built = config.build("cache", settings)
    assert isinstance(built, Cache)
    return built


CACHES: dict[str, Settings] = {
    cases.label(one): one
    for one in [*({"name": name} for name in config.names("cache")), *cases.settings("cache")]
    if getattr(cache_of(one), "chooses", False)
}


def width(cache: Settings) -> int:
    """How many masks of a block are predicted in any case, if there are so many."""
    return getattr(cache_of(cache), WIDTH[cache["name"]])


def run(scheduler: Any, cache: Settings, blocks: Settings, toy: str = "llada", **plugins: Any) -> Result:
    sampler = toys.sampler(toy, scheduler=scheduler, cache=cache, blocks=blocks, **{"guide": BAN, **plugins})
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


def watched(scheduler: Any, cache: Settings, blocks: Settings) -> tuple[Result, list[tuple[Canvas, Query, Any]]]:
    """The result, and the canvas and the query of each forward."""
    spy = toys.Spy(toys.denoiser())
    sampler = Sampler(spy, scheduler=scheduler, cache=cache, blocks=blocks, stop="none", guide=BAN)
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS), spy.calls


def shares(result: Result) -> list[list[int]]:
    """What each forward of a row committed."""
    found = [[len(step) for step in result.trace.steps(row)] for row in range(len(toys.PROMPTS))]
    assert [len(row) for row in found] == result.nfe.tolist()
    assert all(sum(row) == TOKENS for row in found)
    return found


@once
def plain(scheduler: str, blocks: str, toy: str) -> list[int]:
    """The shares without a cache, the same in all rows."""
    first, *others = shares(run(FIXED[scheduler], {"name": "none"}, BLOCKS[blocks], toy))
    assert all(row == first for row in others), "they do hang on predictions"
    return first


def planned(steps: int, length: int) -> list[list[int]]:
    """The shares of LLaDA's schedule in each block of `length`: the first steps of a block take one more."""
    found = []
    for start in range(0, TOKENS, length):
        stop = min(start + length, TOKENS)
        own = max(1, stop * steps // TOKENS - start * steps // TOKENS)
        found.append([(stop - start + own - 1 - at) // own for at in range(min(own, stop - start))])
    return found


def flat(plan: list[list[int]]) -> list[int]:
    """The shares of all blocks."""
    return [share for block in plan for share in block]


def test_every_cache_that_chooses_is_here() -> None:
    assert {one["name"] for one in CACHES.values()} == set(WIDTH)
    assert {width(one) < TOKENS for one in CACHES.values()} == {True, False}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_shares_without_a_cache_are_the_schedule(blocks: str) -> None:
    length = BLOCKS[blocks].get("length", TOKENS)
    for name, steps in (("one per step", TOKENS), ("fixed", 12), ("fixed, 7", 7), ("pc", 11), ("klass", 12)):
        assert plain(name, blocks, "llada") == flat(planned(steps, length))


@pytest.mark.parametrize(
    ("scheduler", "cache", "blocks", "toy"),
    sampled_rows(
        list(product(FIXED, CACHES.values(), BLOCKS, ["llada", "dream"])),
        lambda row: [FIXED[row[0]]["name"], str(row[1]), *row[2:]],
    ),
)
def test_shares_that_fit_are_those_without_a_cache(scheduler: str, cache: Settings, blocks: str, toy: str) -> None:
    wanted, result = plain(scheduler, blocks, toy), run(FIXED[scheduler], cache, BLOCKS[blocks], toy)
    if max(wanted) <= width(cache):
        assert shares(result) == [wanted] * len(toys.PROMPTS)
    else:
        assert all(len(row) >= len(wanted) for row in shares(result))


@pytest.mark.parametrize("scheduler", sampled(ADAPTIVE))
def test_adaptive_schedules_keep_their_steps(scheduler: str) -> None:
    chosen, saved = ADAPTIVE[scheduler], 0
    for cache in CACHES.values():
        for blocks in BLOCKS.values():
            plan = planned(chosen["steps"], blocks.get("length", TOKENS))
            counts = shares(run(chosen, cache, blocks))
            if max(flat(plan)) <= width(cache):
                assert max(map(len, counts)) <= len(flat(plan)), (cache, blocks)
            saved += counts != [flat(plan)] * len(toys.PROMPTS)
    assert saved, "it is the fixed schedule"


def asked(canvas: Canvas, query: Query) -> Tensor:
    """`[B]` masks of the block that are predicted."""
    return canvas.eligible(query.positions).sum(1)


@pytest.mark.parametrize(("steps", "cache", "blocks"), crossed([1, 4, 5], CACHES, BLOCKS))
def test_a_share_that_does_not_fit_is_cut(steps: int, cache: Settings, blocks: Settings) -> None:
    """To what is predicted; from a block's last step on all that is predicted is committed."""
    plan = planned(steps, blocks.get("length", TOKENS))
    result, calls = watched({"name": "fixed", "steps": steps}, cache, blocks)
    for row, counts in enumerate(shares(result)):
        block = -1
        for count, (canvas, query, _) in zip(counts, calls, strict=False):
            left, there, age = (int(part[row]) for part in (canvas.noise_left(), asked(canvas, query), canvas.age))
            block += age == 0
            wanted = plan[block][age] if age + 1 < len(plan[block]) else left
            assert there >= min(width(cache), left)
            assert count == min(wanted, there)
        assert block + 1 == len(plan)
        fits = max(flat(plan)) <= width(cache)
        assert len(counts) == len(flat(plan)) or not fits
        assert len(counts) > len(flat(plan)) or fits or cache["name"] != "elastic"


@pytest.mark.parametrize("stop", sampled(["none", "prefix"]))
def test_masks_behind_an_end_of_text(stop: str) -> None:
    """Elastic-Cache predicts them last: a share may be short once, which costs a forward where it was the last one."""
    late = 0
    for toy, blocks in product(toys.TOYS, BLOCKS.values()):
        steps = len(flat(planned(7, blocks.get("length", TOKENS))))
        nfe = run({"name": "fixed", "steps": 7}, {"name": "elastic"}, blocks, toy, guide=(), stop=stop).nfe
        late += int((nfe > steps).sum())
        assert nfe.max() <= steps + 1
    assert (late > 0) == (stop == "none")  # with prefix the row is over


def test_published_shares_are_refused() -> None:
    """A published loop leaves a block after its steps, with the masks in it that no step was told of."""
    for scheduler in (PublishedFixedSteps(5), PublishedPositionCalibrated(5)):
        for cache in WIDTH:
            with refused("cache-incompatible: cache=dual"):
                toys.sampler(scheduler=scheduler, cache=cache)


def test_a_mask_that_was_not_asked_has_no_history() -> None:
    """KLASS, without bounds, commits all masks that were predicted twice in a row."""
    scheduler = {"name": "klass", "threshold": 0.0, "divergence": float("inf"), "history": 1}
    many = 0
    for cache in CACHES.values():
        result, calls = watched(scheduler, cache, BLOCKS["full"])
        for row in range(len(toys.PROMPTS)):
            before: set[int] = set()
            for step, (canvas, query, _) in zip(result.trace.steps(row), calls, strict=False):
                assert len(step) == 1 or set(step) <= before
                many += len(step) > 1
                before = set((query.positions[row] - canvas.layout.first[row]).tolist())
    assert many


def test_a_run_of_masks_is_one_whatever_of_it_is_asked() -> None:
    """Hierarchical decoding commits one position of each run."""
    holes = 0
    for cache in CACHES.values():
        result, calls = watched({"name": "hierarchical", "low": 0.0}, cache, BLOCKS["full"])
        for row in range(len(toys.PROMPTS)):
            for step, (canvas, query, _) in zip(result.trace.steps(row), calls, strict=False):
                masked = canvas.masked[row]
                run_of = (masked & ~masked.roll(1)).cumsum(0)[canvas.layout.first[row] : -1][step].tolist()
                assert len(set(run_of)) == len(run_of)
                holes += int(asked(canvas, query)[row]) < int(masked.sum())
    assert holes


class Watched(SlowFast):
    """Looks at the canvas behind every step."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        before = self._opened(canvas, carry)[0]
        edit, carry = super().tell(canvas, query, readout, carry)
        left, after = carry[0], canvas.apply(query.positions, edit)
        asked = (canvas.eligible(query.positions) & (query.positions < left[:, None])).any(1)
        moved = (left > before) & asked & ~canvas.done
        assert not (moved & (replace(after, stop=left).noise_left() > 0)).any()
        return edit, carry


def test_a_fast_phase_fills_its_window() -> None:
    """Of SlowFast: as long as it hears of a mask in its window, it does not go on without the others there."""
    for cache, blocks in product(CACHES.values(), BLOCKS.values()):
        run(Watched(0.3, glimpse=0.1, slow=2), cache, blocks)
