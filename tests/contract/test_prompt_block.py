"""Block-causal models whose prompt is one block, behind which the others are counted (`causal_context=False`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler, config
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.values import FREE
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.models import loading
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.training.trajectory import check
from tests import toys
from tests.contract.test_block_causal import PROMPTS, assert_same
from tests.refusals import refused

TOKENS, BLOCK = 10, 6
SURE = {"name": "threshold", "threshold": 0.6}
SEPARATE = {"name": "block_causal", "store_pass": "separate"}
CHECKPOINTS = Path(__file__).parents[1] / "conformance" / "data"


def sampler(**plugins: Any) -> Sampler:
    return toys.sampler("in_blocks", **{"scheduler": SURE, **plugins})


def generate(**plugins: Any) -> Result:
    return sampler(**plugins).generate(PROMPTS, max_new_tokens=TOKENS, seed=list(range(len(PROMPTS))))


def by_hand(prompt: list[int], length: int) -> tuple[list[int], list[int]]:
    """The rule with the plain network and its mask written out."""
    model = toys.denoiser("in_blocks")
    assert isinstance(model, TransformerDenoiser)
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    block = torch.tensor([0] * len(prompt) + [1 + i // length for i in range(TOKENS)])
    while -1 in step_map:
        with torch.no_grad():
            logits = model.transformer(torch.tensor([ids]), keys=(block[None] <= block[:, None])[None])[0]
        logits[:, toys.MASK] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        start = len(prompt) + step_map.index(-1) // length * length
        left = [i for i in range(start, min(start + length, len(ids))) if step_map[i - len(prompt)] < 0]
        for i in [i for i in left if sure[i] >= 0.6] or [max(left, key=lambda i: float(sure[i]))]:
            ids[i], step_map[i - len(prompt)] = int(token[i]), step
        step += 1
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize("length", [6, 4, 32])
@pytest.mark.parametrize("cache", ["none", "block_causal"])
def test_against_the_network_driven_by_hand(cache: str, length: int) -> None:
    result = generate(cache=cache, blocks={"name": "fixed", "length": length})
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt, length)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map


def test_it_is_neither_the_causal_context_nor_the_grid_of_the_row() -> None:
    ours = generate(cache="none").tokens
    context = toys.sampler("context", scheduler=SURE).generate(PROMPTS, max_new_tokens=TOKENS)
    assert not torch.equal(ours, context.tokens)
    model = toys.denoiser("in_blocks")
    assert isinstance(model, TransformerDenoiser)
    other = Sampler(replace(model, prompt_block=False), scheduler=SURE, blocks={"name": "fixed", "length": BLOCK})
    assert not torch.equal(ours, other.generate(PROMPTS, max_new_tokens=TOKENS).tokens)


@pytest.mark.parametrize(
    "plugins",
    [
        {"scheduler": "fixed", "temperature": 0.8},
        {"blocks": {"name": "fixed", "length": 6, "part": 2}},
        {"scheduler": {"name": "s2d2", "policy": "mask_span_length"}},
        {"scheduler": {"name": "editing", "threshold": 0.5, "edit": 0.3, "extra": 3}},
    ],
    ids=["drawn", "parts", "s2d2", "editing"],
)
def test_the_cache_is_exact(plugins: dict[str, Any]) -> None:
    plain, cached = (generate(cache=cache, **plugins) for cache in ("none", "block_causal"))
    assert_same(plain, cached)
    assert (cached.trace.rows < plain.trace.rows).all()


def test_the_prompt_and_each_block_may_be_stored_by_forwards_of_their_own() -> None:
    ride, apart = generate(), generate(cache=SEPARATE)
    assert torch.equal(ride.tokens, apart.tokens)
    assert (apart.nfe - ride.nfe).tolist() == [1 + -(-TOKENS // BLOCK)] * len(PROMPTS)


def test_a_row_of_a_batch_is_the_row_alone() -> None:
    batch, made = generate(temperature=0.8), sampler(temperature=0.8)
    for row, prompt in enumerate(PROMPTS):
        check_row(batch, row, made.generate([prompt], max_new_tokens=TOKENS, seed=row))
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "seed": 0}
    flown = made.generate_many(PROMPTS, batch_size=2, order="given", **options)
    assert [answer.tokens.tolist() for answer in flown] == batch.tokens.tolist()
    several = list(made.generate_many(PROMPTS[:2], batch_size=4, samples=2, order="given", **options))
    assert several[0].tokens.tolist() == batch.tokens[0].tolist(), "a prompt that is computed once for two answers"
    assert several[0].trace is not None
    assert several[0].trace.rows.sum() < batch.trace.rows[0].sum() + len(PROMPTS[0])


def test_a_beginning_that_is_given_is_no_part_of_the_prompts_block() -> None:
    start = [8, 20, 3]
    plain, cached = (
        sampler(cache=cache).generate([Infill([*start, *[FREE] * 11], [7, 1, 30])]) for cache in ("none", "exact")
    )
    assert_same(plain, cached)
    assert plain.tokens[0, :3].tolist() == start
    longer = sampler().generate([[7, 1, 30, *start]], max_new_tokens=11)
    assert not torch.equal(plain.tokens[0, 3:], longer.tokens[0]), "its blocks lie elsewhere"


def test_what_is_refused() -> None:
    with refused("plugins-incompatible: blocks=fixed"):
        sampler(blocks="full")
    with refused("trajectories-unsupported"):
        check(sampler())
    with refused("given-unsupported"):
        sampler().generate([Infill([FREE] * 6 + [4], [1] * 5)])
    sampler().generate([Infill([FREE] * 5 + [4, FREE], [1] * 5)])  # in the gap's own block


def test_the_setting_of_a_model() -> None:
    folder = CHECKPOINTS / "tiny-nemotron-labs-diffusion"
    made = Sampler.from_pretrained({"path": str(folder), "causal_context": False}, device="cpu")
    spec = made.denoiser.spec
    assert (spec.attention, spec.prompt_block, spec.seeds) == ("block_causal", True, False)
    for given in (None, True):
        spec = loading.load(folder, device="cpu", causal_context=given).denoiser.spec
        assert (spec.attention, spec.prompt_block, spec.seeds) == ("causal_context", False, True)
    assert config.model("nemotron-labs-diffusion-8b")["causal_context"] is True
    with refused("option-not-applicable: model.causal_context"):
        loading.load(CHECKPOINTS / "tiny-llada", device="cpu", causal_context=False)
