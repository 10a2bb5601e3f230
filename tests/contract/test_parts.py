"""Blocks decoded in parts, a logit shift under block-causal attention, and the cache that computes a part alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.check.promises import check_row
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.contract.test_block_causal import PROMPTS, assert_same
from tests.refusals import refused

TOKENS, BLOCK, PART = 10, 6, 3
PARTS = {"name": "fixed", "length": BLOCK, "part": PART}
SEPARATE = {"name": "block_causal", "store_pass": "separate"}
SURE = {"name": "threshold", "threshold": 0.6}


def generate(kind: str = "fast", prompts: list[list[int]] = PROMPTS, **plugins: Any) -> Result:
    given = {"blocks": PARTS, "scheduler": SURE, **plugins}
    seeds = list(range(len(prompts)))
    return toys.sampler(kind, **given).generate(prompts, max_new_tokens=TOKENS, seed=seeds)


def by_hand(prompt: list[int]) -> tuple[list[int], list[int]]:
    """Fast-dLLM v2's rule without a cache, with the plain network and its mask written out."""
    model = toys.denoiser("fast")
    assert isinstance(model, TransformerDenoiser)
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    block_of = torch.tensor([i // BLOCK for i in range(len(ids))])
    while -1 in step_map:
        with torch.no_grad():
            raw = model.transformer(torch.tensor([ids]), keys=(block_of[None] <= block_of[:, None])[None])[0]
        logits = torch.cat([raw[:1], raw[:-1]])  # row i - 1 predicts position i, also across the edge of a block
        logits[:, toys.MASK] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        active = (len(prompt) + step_map.index(-1)) // PART
        left = [i for i in range(len(prompt), len(ids)) if i // PART == active and step_map[i - len(prompt)] < 0]
        for i in [i for i in left if sure[i] >= 0.6] or [max(left, key=lambda i: float(sure[i]))]:
            ids[i], step_map[i - len(prompt)] = int(token[i]), step
        step += 1
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize("cache", ["none", "block_causal", SEPARATE])
def test_against_the_network_driven_by_hand(cache: Any) -> None:
    result = generate(cache=cache)
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt)
        assert result.trace.decoded[row].tolist() == tokens
        if cache != SEPARATE:
            assert result.trace.generated[row].tolist() == step_map


@pytest.mark.parametrize("kind", ["causal", "fast"])
@pytest.mark.parametrize("scheduler", ["fixed", {"name": "dynamic", "threshold": 0.6, "steps": 2}])
def test_the_cache_is_exact_for_parts(kind: str, scheduler: Any) -> None:
    plain, cached = (generate(kind, scheduler=scheduler, cache=cache) for cache in ("none", "block_causal"))
    assert_same(plain, cached)
    assert (cached.trace.rows < plain.trace.rows).all()
    whole = generate(kind, scheduler=scheduler, blocks={"name": "fixed", "length": BLOCK})
    assert not torch.equal(whole.tokens, plain.tokens), "parts changed nothing"


@pytest.mark.parametrize("kind", ["causal", "fast"])
def test_a_forward_that_stores_follows_a_block_and_no_part(kind: str) -> None:
    ride, apart = generate(kind, cache="block_causal"), generate(kind, cache=SEPARATE)
    assert torch.equal(ride.tokens, apart.tokens)
    for row, prompt in enumerate(PROMPTS):
        blocks = -(-(len(prompt) + TOKENS) // BLOCK) - len(prompt) // BLOCK
        assert int(apart.nfe[row]) == int(ride.nfe[row]) + blocks + (len(prompt) >= BLOCK)


@pytest.mark.parametrize("kind", ["causal", "fast"])
def test_under_a_shift_one_more_row_is_computed_until_the_first_position_is_known(kind: str) -> None:
    """One token a step, the last position first: the block's first position stays unknown to the end."""
    prompt = [[5, 11, 3, 9, 2, 7]]
    sampler = toys.sampler(kind, cache="block_causal", scheduler="fixed", blocks={"name": "fixed", "length": BLOCK})
    steps = list(sampler.stream(prompt, max_new_tokens=BLOCK))
    rows = int(steps[-1].result.trace.rows) if steps[-1].result is not None else 0
    order = steps[-1].result.trace.steps() if steps[-1].result is not None else []
    known = order.index([0])  # forwards before the one that commits the first position
    assert rows == 2 * BLOCK + BLOCK * (BLOCK - 1) + (known if kind == "fast" else 0)


@pytest.mark.parametrize(("kind", "cache"), [("fast", "block_causal"), ("causal", "sub_block")])
def test_a_row_of_a_batch_is_the_row_alone(kind: str, cache: str) -> None:
    batch = generate(kind, cache=cache, temperature=0.8)
    for row in (1, len(PROMPTS) - 1):
        sampler = toys.sampler(kind, cache=cache, temperature=0.8, blocks=PARTS, scheduler=SURE)
        alone = sampler.generate([PROMPTS[row]], max_new_tokens=TOKENS, seed=row)
        check_row(batch, row, alone)
    sampler = toys.sampler(kind, cache=cache, temperature=0.8, blocks=PARTS, scheduler=SURE)
    flown = sampler.generate_many(PROMPTS, batch_size=2, max_new_tokens=TOKENS, seed=0, order="given")
    assert [answer.tokens.tolist() for answer in flown] == batch.tokens.tolist()


def test_the_block_cache_computes_a_part_once_its_first_position_is_known() -> None:
    plugins: dict[str, Any] = {"blocks": PARTS, "scheduler": "leftright", "stop": "none"}
    made = toys.sampler("causal", cache="sub_block", **plugins).generate([[5, 11, 3]], max_new_tokens=9)
    # The first part of its block is prompt. Each part: its first forward computes whole blocks (two where the one
    # before is stored), the other two only the part.
    assert int(made.trace.rows) == (6 + 3 + 3) + (12 + 3 + 3) + (6 + 3 + 3)
    same = [
        toys.sampler("causal", cache=cache, scheduler="fixed").generate(PROMPTS, max_new_tokens=9)
        for cache in ("sub_block", "block_causal")
    ]
    assert_same(*same)  # blocks that are decoded whole


def test_drafts_change_nothing() -> None:
    plain = generate(scheduler="fixed")
    drafted = generate(scheduler={"name": "freedave", "inner": {"name": "fixed"}})
    assert torch.equal(plain.tokens, drafted.tokens)
    assert (drafted.nfe < plain.nfe).any(), "no draft was accepted"


def test_what_is_refused() -> None:
    with refused("blocks-incompatible: blocks.part"):
        toys.sampler("llada", blocks=PARTS)
    with refused("option-range: blocks.part=4"):
        toys.sampler("causal", blocks={"name": "fixed", "length": 6, "part": 4})
    with refused("option-range: blocks.part"):
        toys.sampler("causal", blocks={"name": "fixed", "part": 0})
    with refused("cache-incompatible: cache=sub_block"):
        toys.sampler("llada", cache="sub_block")
    with refused("cache-incompatible: cache=sub_block"):
        toys.sampler("causal", cache="sub_block", scheduler="freedave", blocks=PARTS)
    plugins = Sampler(toys.denoiser("causal"), blocks={"name": "fixed", "part": 8}).plugins
    assert plugins.blocks.grid == 32 and plugins.with_block_length(16).blocks.part == 8
