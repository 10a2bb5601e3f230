"""Several open blocks, and d3LLM's cache and early stop, against the rules typed again."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from dllm_sampler import Query, Readout, Result
from dllm_sampler.blocks.multi_block import MultiBlock
from dllm_sampler.published import StrictEntropy
from dllm_sampler.result import Trace
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few

TOKENS, LENGTH = 17, 4
ENTROPY = {"name": "entropy", "entropy": 1.0}


def run(add: float = 0.25, tokens: int = TOKENS, **plugins: Any) -> Result:
    blocks = {"name": "multi_block", "length": LENGTH, "add_threshold": add}
    sampler = toys.sampler(**{"scheduler": ENTROPY, "blocks": blocks, "stop": "none", **plugins})
    return sampler.generate(toys.PROMPTS, max_new_tokens=tokens, seed=toys.SEEDS)


def blocks_of(trace: Trace, row: int) -> list[list[int]]:
    """The forward that committed each position, block by block."""
    steps = trace.generated[row].tolist()
    return [steps[at : at + LENGTH] for at in range(0, len(steps), LENGTH)]


def finished(block: list[int], forward: int) -> bool:
    return max(block) < forward


@few("scheduler", [ENTROPY, {"name": "threshold", "threshold": 0.6}, "factor", "hierarchical"])
@each("add", [0.25, 0.75])
def test_blocks_open_one_by_one_and_the_first_gets_on(scheduler: Any, add: float) -> None:
    result, most = run(add, scheduler=scheduler), 0
    for row in range(len(toys.PROMPTS)):
        blocks, opened = blocks_of(result.trace, row), 1
        for forward in range(int(result.nfe[row])):
            last = blocks[opened - 1]
            share = sum(step < forward for step in last) / len(last)
            opened = min(len(blocks), opened + (share >= add))
            assert all(forward not in block for block in blocks[opened:])
            first = next(at for at, block in enumerate(blocks) if not finished(block, forward))
            assert forward in blocks[first]
            most = max(most, opened - first)
    assert most > 1


@pytest.mark.slow
@each("scheduler", [ENTROPY, {"name": "threshold", "threshold": 0.6}])
def test_one_block_at_a_time_is_fixed_blocks(scheduler: Any) -> None:
    one = run(1.0, scheduler=scheduler)
    two = run(scheduler=scheduler, blocks={"name": "fixed", "length": LENGTH})
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.trace.generated, two.trace.generated)


def test_without_a_bound_each_forward_fills_a_block() -> None:
    assert run(scheduler={"name": "entropy", "entropy": 99.0}).nfe.tolist() == [5] * len(toys.PROMPTS)


def test_a_rule_that_guarantees_nothing_gets_on() -> None:
    for scheduler, forwards in ((StrictEntropy(-1.0), {TOKENS}), ({"name": "entropy", "entropy": -1.0}, range(9, 18))):
        result = run(scheduler=scheduler)
        assert result.complete.all() and all(count in forwards for count in result.nfe.tolist())


def test_full_blocks_get_on_too() -> None:
    blocks = {"name": "multi_block", "length": LENGTH, "add_threshold": 0.25, "full_threshold": 0.0}
    result = run(scheduler=StrictEntropy(-1.0), blocks=blocks)
    for row in range(len(toys.PROMPTS)):
        for before, block in pairwise(blocks_of(result.trace, row)):
            assert all(forward in block for forward in range(min(block), max(block)))  # one in each, once it is open
            assert min(block) <= min(before) + 1
    assert (result.nfe < TOKENS).all()


@pytest.mark.slow
def test_progress_is_ranked_as_the_scheduler_ranks() -> None:
    """Entropy and confidence disagree on some toy: else the ranking would not show."""
    by_entropy = run(scheduler=StrictEntropy(-1.0), add=1.0)
    fixed = run(scheduler={"name": "fixed", "score": "entropy"}, blocks={"name": "fixed", "length": LENGTH})
    by_confidence = run(scheduler="fixed", blocks={"name": "fixed", "length": LENGTH})
    assert torch.equal(by_entropy.trace.generated, fixed.trace.generated)
    assert not torch.equal(by_confidence.trace.generated, fixed.trace.generated)


def test_an_end_token_is_lowered_where_a_block_must_get_on_too() -> None:
    canvas = toys.canvas(torch.ones(1, 4, dtype=torch.bool))
    sure = torch.tensor([[[0.9, 0.5, 0.8, 0.7]]], dtype=torch.float64)
    readout = Readout(torch.tensor([[[toys.EOS, 1, 2, 3]]]), sure)
    scheduler = Eoser(Threshold(2.0), low=0.0, high=0.0).bind(toys.context())
    edit, _ = scheduler.tell(canvas, Query.masks(canvas), readout, None)
    assert edit.commit.tolist() == [[False, False, True, False]]
    made = MultiBlock(2).progress(canvas, Query.masks(canvas), readout, edit)
    assert made.commit.tolist() == [[False, True, True, False]]


@few("kind", ["llada", "dream"])
@few(("delay", "every"), [(0, None), (1, 3), (2, None), (3, 2)])
def test_columns_that_the_cache_computes(kind: str, delay: int, every: int | None) -> None:
    cache = {"name": "delayed_prefix", "delay": delay, "refresh_every": every}
    result = run(kind=kind, cache=cache)
    for row in range(len(toys.PROMPTS)):
        first, blocks = len(toys.PROMPTS[row]), blocks_of(result.trace, row)
        stored, found, computed, kept = 0, [0], 0, []  # found: the forward that found the prompt, block 1, ... finished
        for number in range(1, int(result.nfe[row]) + 1):
            while len(found) <= len(blocks) and finished(blocks[len(found) - 1], number - 1):
                found.append(number)
            due = sum(number - one >= delay for one in found)
            edge = 0 if not due else first + LENGTH * (due - 1)
            whole = edge == stored and (len(found) > due or (every is not None and number % every == 0))
            computed += first + TOKENS - (0 if whole else max(0, stored - (kind == "dream")))
            stored = edge
            kept.append(stored)
        assert int(result.trace.rows[row]) == computed
        assert max(kept) > first or delay > 2


@pytest.mark.slow
def test_what_is_never_stored_changes_nothing() -> None:
    late, none = run(cache={"name": "delayed_prefix", "delay": 99}), run()
    assert torch.equal(late.trace.generated, none.trace.generated) and torch.equal(late.tokens, none.tokens)
    assert torch.equal(late.trace.logprob, none.trace.logprob)
    soon = run(cache="delayed_prefix")
    assert (soon.trace.logprob - none.trace.logprob).abs().max() > 0.01


@each("cache", ["none", {"name": "delayed_prefix", "delay": 1}])
def test_an_end_token_fills_what_stands_behind_it(cache: Any) -> None:
    steps, fired = toys.sampler(scheduler=ENTROPY, blocks="full", stop="fill", cache=cache), 0
    for row in steps.stream(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS):
        for ids, masked in zip(row.tokens.tolist(), row.masked.tolist(), strict=True):
            ends = [at for at, token in enumerate(ids) if token == toys.EOS and not masked[at]]
            if ends:
                assert not any(masked[ends[0] :]) and set(ids[ends[0] :]) == {toys.EOS}
                fired += any(masked)
    assert fired


REFUSED = {
    "plugins-incompatible: scheduler=fixed": {"scheduler": "fixed"},
    "plugins-incompatible: scheduler=freedave": {"scheduler": {"name": "freedave", "inner": "threshold"}},
    "plugins-incompatible: scheduler=lopa, scheduler.inner=fixed": {"scheduler": {"name": "lopa", "inner": "fixed"}},
    "plugins-incompatible: scheduler=wino": {"scheduler": "wino"},
    "plugins-incompatible: scheduler=learn2pd": {"scheduler": {"name": "learn2pd", "filter": toys.FILTER}},
    "stop-incompatible: stop=block": {"stop": "block"},
    "blocks-incompatible: blocks=fixed": {"kind": "causal", "cache": "none"},
}


@each("refusal", REFUSED)
def test_refusals(refusal: str) -> None:
    with refused(f"{refusal}, blocks=multi_block"):
        run(**REFUSED[refusal])


@each(("name", "value"), [("length", 0), ("add_threshold", 0.0), ("full_threshold", 2.0)])
def test_fields(name: str, value: float) -> None:
    with refused(f"option-range: blocks.{name}"):
        toys.sampler(blocks={"name": "multi_block", name: value})
