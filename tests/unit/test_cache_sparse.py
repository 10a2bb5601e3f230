"""Sparse-dLLM: its ends, its rule by hand, and what it holds in memory; recorded runs are in tests/conformance."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Result, Sampler
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.sparse import SparseCache, best, importance
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few
from tests.scripted import same

TOKENS, BLOCK, BAR = 17, 6, 0.7


def run(cache: Any, kind: str = "llada", rows: slice = slice(None), **plugins: Any) -> Result:
    sampler = toys.sampler(kind, cache=cache, **{"scheduler": Threshold(BAR), **plugins})
    return sampler.generate(toys.PROMPTS[rows], max_new_tokens=TOKENS, seed=toys.SEEDS[rows])


@dataclass
class LateDual(DualCache):
    """The dual cache with one more whole forward per block."""

    def due(self, canvas: Canvas) -> Tensor:
        return canvas.age <= 1


@pytest.mark.slow
@few("kind", toys.TOYS)
def test_keeping_everything_is_the_dual_cache_with_one_more_whole_forward(kind: str) -> None:
    late = run(LateDual(), kind)
    assert same(run(SparseCache(keep=1.0), kind), late)
    assert same(run(SparseCache(keep=1.0, delay=0), kind), run("dual", kind))
    assert not same(run(SparseCache(), kind), late)


@few("kind", toys.TOYS)
def test_a_delay_that_never_ends_is_no_cache(kind: str) -> None:
    assert same(run(SparseCache(delay=99), kind), run("none", kind))


def test_a_block_may_be_the_whole_generation() -> None:
    one = run(SparseCache(keep=1.0), "dream", rows=slice(2, 3), blocks="full")  # a prompt of one token
    assert same(one, run(LateDual(), "dream", rows=slice(2, 3), blocks="full"))


def test_by_hand() -> None:
    q = torch.tensor([[[[0.0], [2.0], [4.0], [0.0], [0.0]], [[0.0], [1.0], [1.0], [0.0], [0.0]]]])  # two heads
    block = torch.tensor([[False, True, True, False, False]])
    k = torch.tensor([[[[1.0], [9.0], [9.0], [2.0], [-1.0]], [[1.0], [9.0], [9.0], [0.0], [4.0]]]])
    # mean queries 3 and 1: (3*1 + 1*1)/2, -, -, (3*2 + 0)/2, (-3 + 4)/2
    assert importance(q, k, block)[~block].tolist() == [2.0, 3.0, 0.5]
    shared = importance(q, k[:, :1], block)  # one key head for both: mean query 2
    assert shared[~block].tolist() == [2.0, 4.0, -2.0]

    score = torch.tensor([[1.0, 9.0, 9.0, 5.0, 2.0, 3.0]])
    among = torch.tensor([[True, False, False, True, True, True]])
    for count, kernel, kept in [(2, 1, [3, 5]), (2, 3, [0, 3]), (3, 3, [0, 3, 4]), (0, 3, [])]:
        taken = best(score, among, torch.tensor([count]), kernel)  # pooled by three: 5, 5, 5, 3
        assert taken[0].nonzero()[:, 0].tolist() == kept


def test_what_is_evicted_takes_no_memory() -> None:
    """Slots are as many as can be kept, and the kept columns lie outside the block."""
    spy = toys.Spy(toys.denoiser())
    blocks = {"name": "fixed", "length": BLOCK}
    sampler = Sampler(spy, cache=SparseCache(), scheduler=Threshold(BAR), blocks=blocks, stop="none")
    sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    length = spy.calls[0][0].length
    canvas, _, plan = spy.calls[-1]
    live = plan.cache
    assert isinstance(live, SparseCache) and live.slots is not None
    assert [tuple(keys.shape[:2]) for keys in live.slots.keys] == [(len(toys.PROMPTS), length // 2)] * 2
    last = ~canvas.done
    for columns in live.kept:
        there = columns[last] < length
        outside = (columns[last] < canvas.start[last, None]) | (columns[last] >= canvas.stop[last, None])
        assert (outside | ~there).all()
        size = (canvas.end - (canvas.stop - canvas.start))[last]
        assert torch.equal(there.sum(1), size // 2)
    assert not torch.equal(live.kept[0], live.kept[1]), "each layer has a choice of its own"


@each(
    ("fields", "says"),
    [
        ({"keep": 1.2}, "option-range: cache.keep"),
        ({"keep": -0.1}, "option-range: cache.keep"),
        ({"kernel": 2}, "option-range: cache.kernel"),
        ({"kernel": 0}, "option-range: cache.kernel"),
        ({"delay": -1}, "option-range: cache.delay"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with refused(says):
        SparseCache(**fields)
