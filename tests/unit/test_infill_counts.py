"""Methods and schedules count what is free of an answer, not what is given of it."""

from __future__ import annotations

import pytest
import torch

from dllm_sampler import Edit, Sampler
from dllm_sampler.core import packing
from dllm_sampler.core.values import FREE
from tests import toys
from tests.sampling import few
from tests.unit.test_infill import PROMPT, made


def test_steps_and_blocks_count_what_is_free() -> None:
    """A fixed schedule keeps to its steps; blocks that are given cost no forward."""
    for length in (3, 4, 8):
        sampler = made(scheduler={"name": "fixed", "steps": 4}, blocks={"name": "fixed", "length": length})
        pinned = [1] * 20 + [FREE] * 4 + [2] * 3 + [FREE] * 4 + [3] * 9
        assert sampler.generate([PROMPT], max_new_tokens=40, pinned=pinned).nfe[0] == 4
    for name, most in (("rcr", 4), ("remdm", 5), ("origin", 4)):
        sampler = made(scheduler={"name": name, "steps": None}, blocks={"name": "fixed", "length": 16})
        assert sampler.generate([PROMPT], max_new_tokens=16, suffix=[1] * 12).nfe[0] <= most
    refine = made(scheduler={"name": "block_refine", "steps": 4, "threshold": 1.0}, blocks="full")
    steps = refine.generate([PROMPT], max_new_tokens=16, suffix=[1] * 12).step_map[0, :4]
    assert steps.sort().values.tolist() == [0, 1, 2, 3]


def test_a_method_counts_what_is_free() -> None:
    """Ascending steps, Prophet's bounds, horizons: what is given is neither left to do nor done."""
    suffix, blocks = [1] * 12, {"name": "full"}
    assert made(scheduler="ascending", blocks=blocks).generate([PROMPT], max_new_tokens=16, suffix=suffix).nfe[0] == 2
    never = {"name": "prophet", "early": float("inf"), "mid": 0.0, "late": 0.0}
    late = made(scheduler={"name": "fixed"}, stop=never, blocks=blocks)
    assert late.generate([PROMPT], max_new_tokens=16, suffix=suffix).nfe[0] == 3, "a third of what is free"
    for scheduler, shown in (
        ({"name": "leftright", "tokens_per_step": 1, "max_lookahead": 2}, [2] * 10 + [1]),
        ({"name": "slowfast", "threshold": 0.9, "glimpse": 0.6, "slow": 1}, [11, 9, 5, 2, 1, 2, 1]),
    ):
        spy = toys.Spy(toys.denoiser())
        hides = Sampler(spy, scheduler=scheduler, blocks="full", stop="none")
        hides.generate([PROMPT], max_new_tokens=12, suffix=[3])
        limits = [int(query.limit) for _, query, _ in spy.calls if query.limit is not None]
        assert {*limits} == {len(PROMPT) + 12}, "given tokens are not hidden"
        seen = [int((canvas.masked & packing.computable(canvas, query, None)).sum()) for canvas, query, _ in spy.calls]
        assert seen == shown, "masks are, those before a given token too"


def test_a_mask_behind_the_horizon_waits() -> None:
    """The second mask is not within two columns of the first, and a given token behind it makes no difference."""
    scheduler = {"name": "leftright", "tokens_per_step": 2, "max_lookahead": 2}
    pinned = [FREE, 1, 1, FREE, 1]
    result = made(scheduler=scheduler, blocks="full").generate([PROMPT], max_new_tokens=5, pinned=pinned)
    assert result.step_map[0].tolist() == [0, -1, -1, 1, -1]


def test_nothing_cuts_what_is_given_off() -> None:
    canvas = toys.canvas(torch.tensor([[True, True, False, True]]))
    canvas = toys.changed(canvas, frozen=~canvas.masked, given=torch.tensor([3]))
    at = torch.tensor([[0]])
    edit = Edit(at, at > 0, end=torch.tensor([1]))
    assert canvas.apply(at, edit).end == 3


def test_shares_of_what_is_free() -> None:
    canvas = toys.canvas(torch.tensor([[False, True, True, False, True, False]]))
    canvas = toys.changed(canvas, frozen=~canvas.masked, given=torch.tensor([6]), start=torch.tensor([1]))
    assert canvas.inside(torch.arange(6)[None]).tolist() == [[False, True, True, False, True, False]]
    assert canvas.free_before(torch.tensor([4])) == 2 and canvas.free_in_block() == 3 and canvas.progress() == 0
    assert canvas.next_free(torch.tensor([3])) == 4 and canvas.next_free(torch.tensor([5])) == 6


@few("passes", ["ride", "separate"])
@few("size", [1, 5, 6, 9])
def test_a_beginning_is_like_the_end_of_the_prompt(passes: str, size: int) -> None:
    """For a block-causal model: the same forwards, those that only store among them."""
    cache, front = {"name": "block_causal", "store_pass": passes}, list(range(1, size + 1))
    sampler = made("causal", cache=cache, blocks={"name": "fixed", "length": 4}, scheduler={"name": "fixed"})
    prefixed = sampler.generate([PROMPT], max_new_tokens=9 + size, prefix=front)
    plain = sampler.generate([PROMPT + front], max_new_tokens=9)
    assert torch.equal(prefixed.tokens[0, size:], plain.tokens[0]) and prefixed.nfe == plain.nfe
    assert torch.equal(prefixed.step_map[0, size:], plain.step_map[0])


@pytest.mark.slow
def test_drafting_over_the_end_of_a_block() -> None:
    """The next block begins behind what is given, and is drafted to its end: tokens are the inner scheduler's."""
    inner, blocks = {"name": "fixed", "steps": None}, {"name": "fixed", "length": 4}
    drafted = {"name": "freedave", "inner": inner, "eager": True, "draft": 6}
    saved = 0
    for seed in range(2):
        pinned = [FREE] * 4 + [seed, 1] + [FREE] * 5 + [2] + [FREE] * 4
        plain = made(scheduler=inner, blocks=blocks).generate([[seed, 5]], max_new_tokens=16, pinned=pinned)
        fast = made(scheduler=drafted, blocks=blocks).generate([[seed, 5]], max_new_tokens=16, pinned=pinned)
        assert torch.equal(fast.tokens, plain.tokens)
        saved += int(plain.nfe - fast.nfe)
    assert saved > 0
