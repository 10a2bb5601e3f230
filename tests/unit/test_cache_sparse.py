"""Sparse-dLLM: against a decoder written again from the paper, its ends, and what it holds in memory."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler import Canvas, Result, Sampler, UserError
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.sparse import SparseCache, best, importance
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.sampling import crossed

TOKENS, BLOCK, BAR = 17, 6, 0.7


def run(cache: Any, kind: str = "llada", rows: slice = slice(None), **plugins: Any) -> Result:
    sampler = toys.sampler(kind, cache=cache, **{"scheduler": Threshold(BAR), **plugins})
    return sampler.generate(toys.PROMPTS[rows], max_new_tokens=TOKENS, seed=toys.SEEDS[rows])


def same(one: Result, other: Result) -> bool:
    names = ("ids", "step_map", "nfe", "rows")
    return all(torch.equal(getattr(one.trace, name), getattr(other.trace, name)) for name in names)


def forward(
    model: TransformerDenoiser, ids: list[int], at: Tensor, kept: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """`[M, V]` logits of the columns `at [M]`, which see `kept` and themselves; and q, k, v of each layer."""
    network, heads = model.transformer, []
    hidden = network.embed(torch.tensor(ids)[at])[None]
    rope = network.rope(at[None], hidden.dtype)
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.qkv(hidden, rope)
        heads.append((q, k, v))
        if kept:
            k, v = torch.cat([k, kept[index][0]], 2), torch.cat([v, kept[index][1]], 2)
        hidden = hidden + layer.attend(q, k, v)
        hidden = hidden + layer.mlp(hidden)
    return network.head(network.norm(hidden))[0], heads


def filtered(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, keep: float, kernel: int) -> tuple[Tensor, Tensor]:
    """The rule as its authors put it: the block cut out, scores pooled, the best by `topk`."""
    k_rest = torch.cat([k[:, :, :start], k[:, :, stop:]], 2)
    v_rest = torch.cat([v[:, :, :start], v[:, :, stop:]], 2)
    query = q[:, :, start:stop].mean(2, keepdim=True)
    score = (query @ k_rest.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)[:, :, 0].mean(1)
    score = F.max_pool1d(score[:, None], kernel, 1, kernel // 2)[0, 0]
    order = sorted(range(len(score)), key=lambda i: (-float(score[i]), i))[: int(len(score) * keep)]
    return k_rest[:, :, order], v_rest[:, :, order]


def decode(kind: str, prompt: list[int], keep: float, kernel: int, delay: int) -> tuple[list[int], list[int]]:
    """Tokens and step map of a threshold decoder under the sparse cache."""
    model = toys.denoiser(kind)
    assert isinstance(model, TransformerDenoiser)
    length, step, steps = len(prompt) + TOKENS, 0, [-1] * TOKENS
    back = int(model.shift)
    ids = [*prompt, *[toys.MASK] * TOKENS]
    for start in range(len(prompt), length, BLOCK):
        stop, age, kept = min(start + BLOCK, length), 0, []
        while masks := [i for i in range(start, stop) if ids[i] == toys.MASK]:
            columns = torch.arange(length) if age <= delay else torch.arange(start - back, stop)
            with torch.no_grad():
                logits, heads = forward(model, ids, columns, kept if age > delay else [])
            if age == delay:
                kept = [filtered(*layer, start - back, stop, keep, kernel) for layer in heads]
            logits[:, toys.MASK] = -torch.inf
            p = {i: logits[i - back - int(columns[0])].softmax(-1) for i in masks}
            surest = max(masks, key=lambda i: (float(p[i].max()), -i))
            for i in masks:
                if i == surest or p[i].max() >= BAR:
                    ids[i], steps[i - len(prompt)] = int(p[i].argmax()), step
            step, age = step + 1, age + 1
    return ids[len(prompt) :], steps


CASES = [(0.5, 3, 1), (0.3, 1, 1), (0.2, 5, 0), (0.0, 3, 1), (0.8, 3, 2)]


@pytest.mark.parametrize(("case", "kind"), crossed(CASES, ["llada", "gqa", "dream"]))
def test_it_is_its_paper(case: tuple[float, int, int], kind: str) -> None:
    keep, kernel, delay = case
    result = run(SparseCache(keep=keep, kernel=kernel, delay=delay), kind)
    for row, prompt in enumerate(toys.PROMPTS):
        tokens, steps = decode(kind, prompt, keep, kernel, delay)
        assert result.tokens[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == steps


@dataclass
class LateDual(DualCache):
    """The dual cache with one more whole forward per block."""

    def due(self, canvas: Canvas) -> Tensor:
        return canvas.age <= 1


@pytest.mark.parametrize("kind", toys.TOYS)
def test_keeping_everything_is_the_dual_cache_with_one_more_whole_forward(kind: str) -> None:
    late = run(LateDual(), kind)
    assert same(run(SparseCache(keep=1.0), kind), late)
    assert same(run(SparseCache(keep=1.0, delay=0), kind), run("dual", kind))
    assert not same(run(SparseCache(), kind), late)


@pytest.mark.parametrize("kind", toys.TOYS)
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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"keep": 1.2}, "cache.keep must be a share"),
        ({"keep": -0.1}, "cache.keep must be a share"),
        ({"kernel": 2}, "cache.kernel must be an odd number"),
        ({"kernel": 0}, "cache.kernel must be an odd number"),
        ({"delay": -1}, "cache.delay must be a whole number"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        SparseCache(**fields)
