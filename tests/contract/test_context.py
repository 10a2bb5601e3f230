"""Blocks in a causal context, whose first token the row before them predicts (Nemotron-Labs-Diffusion)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_sampler import Result
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.values import FREE
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.training.trajectory import check
from tests import toys
from tests.contract.test_block_causal import PROMPTS, assert_same
from tests.refusals import refused

TOKENS, BLOCK = 10, 6
SURE = {"name": "threshold", "threshold": 0.6}


def generate(**plugins: Any) -> Result:
    seeds = list(range(len(PROMPTS)))
    return toys.sampler("context", **{"scheduler": SURE, **plugins}).generate(
        PROMPTS, max_new_tokens=TOKENS, seed=seeds
    )


def by_hand(prompt: list[int]) -> tuple[list[int], list[int]]:
    """The rule with the plain network and its mask written out; blocks are counted from the prompt's end."""
    model = toys.denoiser("context")
    assert isinstance(model, TransformerDenoiser)
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    column = torch.arange(len(ids))
    while -1 in step_map:
        start = len(prompt) + step_map.index(-1) // BLOCK * BLOCK
        stop = min(start + BLOCK, len(ids))
        inside = (column >= start) & (column < stop)
        sees = (column[None] <= column[:, None]) | (inside[None] & inside[:, None])
        with torch.no_grad():
            logits = model.transformer(torch.tensor([ids]), keys=sees[None])[0]
        logits[start] = logits[start - 1]  # the context's last row
        logits[:, toys.MASK] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        left = [i for i in range(start, stop) if step_map[i - len(prompt)] < 0]
        for i in [i for i in left if sure[i] >= 0.6] or [max(left, key=lambda i: float(sure[i]))]:
            ids[i], step_map[i - len(prompt)] = int(token[i]), step
        step += 1
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize("plugins", [{"cache": "none"}, {}])
def test_against_the_network_driven_by_hand(plugins: dict[str, Any]) -> None:
    result = generate(**plugins)
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map


@pytest.mark.parametrize(
    ("scheduler", "blocks"),
    [
        ("fixed", {"name": "ascending", "count": 3}),
        ({"name": "dynamic", "threshold": 0.6}, "full"),
        ({"name": "editing", "extra": 2}, {"name": "fixed", "length": 4}),
    ],
)
def test_the_cache_is_exact(scheduler: Any, blocks: Any) -> None:
    plain, cached = (generate(scheduler=scheduler, blocks=blocks, cache=cache) for cache in ("none", "exact"))
    assert_same(plain, cached)
    if blocks != "full":
        assert (cached.trace.rows < plain.trace.rows).all()


def test_a_row_of_a_batch_is_the_row_alone() -> None:
    batch = generate(temperature=0.8)
    for row, prompt in enumerate(PROMPTS):
        sampler = toys.sampler("context", temperature=0.8, scheduler=SURE)
        check_row(batch, row, sampler.generate([prompt], max_new_tokens=TOKENS, seed=row))
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "seed": 0}
    sampler = toys.sampler("context", temperature=0.8, scheduler=SURE)
    flown = sampler.generate_many(PROMPTS, batch_size=2, order="given", **options)
    assert [answer.tokens.tolist() for answer in flown] == batch.tokens.tolist()
    several = list(sampler.generate_many(PROMPTS[:2], batch_size=4, samples=2, order="given", **options))
    assert several[0].tokens.tolist() == batch.tokens[0].tolist(), "a prompt that is computed once for two answers"


def test_positions_far_from_the_start_scale_queries() -> None:
    rope = toys.transformer()
    model = toys.denoiser("context")
    assert isinstance(model, TransformerDenoiser)
    at = torch.arange(30)[None]
    made = model.transformer.rope(at, torch.float64)
    assert made.scale is not None and rope.rope(at, torch.float64).scale is None
    expected = 1 + 0.3 * torch.log(1 + torch.arange(30).div(8, rounding_mode="floor").double())
    torch.testing.assert_close(made.scale.flatten(), expected)
    some = made.at(torch.tensor([[3, 20]]))
    assert some.scale is not None
    torch.testing.assert_close(some.scale.flatten(), expected[[3, 20]])


def test_what_is_refused() -> None:
    for scheduler in ("wino", "freedave"):
        with refused(f"plugins-incompatible: scheduler={scheduler}"):
            toys.sampler("context", scheduler=scheduler, cache="none")
    with refused("cache-incompatible: cache.store_pass=separate"):
        toys.sampler("context", cache={"name": "block_causal", "store_pass": "separate"})
    with refused("cache-incompatible: cache=dual"):
        toys.sampler("context", cache="dual")
    with refused("blocks-incompatible: blocks.part"):
        toys.sampler("context", blocks={"name": "fixed", "part": 2})
    sampler = toys.sampler("context")
    check(sampler)
    with refused("trajectories-unsupported"):
        check(toys.sampler("context", scheduler="ascending", blocks="ascending"))
    with refused("given-unsupported"):
        sampler.generate([Infill([1, FREE, FREE, 4])])
