"""Block-causal models whose blocks are counted from the answer: the prompt is one block, or cut into blocks, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler, config
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.spec import BlocksFrom
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


def sampler(blocks_from: BlocksFrom = "whole_prompt", **plugins: Any) -> Sampler:
    model = toys.denoiser("in_blocks")
    assert isinstance(model, TransformerDenoiser)
    given = {"scheduler": SURE, "blocks": {"name": "fixed", "length": BLOCK}, "stop": "none", **plugins}
    return Sampler(replace(model, blocks_from=blocks_from), **given)


def generate(blocks_from: BlocksFrom = "whole_prompt", **plugins: Any) -> Result:
    return sampler(blocks_from, **plugins).generate(PROMPTS, max_new_tokens=TOKENS, seed=list(range(len(PROMPTS))))


def by_hand(prompt: list[int], length: int, blocks_from: BlocksFrom) -> tuple[list[int], list[int]]:
    """The rule with the plain network and its mask written out."""
    model = toys.denoiser("in_blocks")
    assert isinstance(model, TransformerDenoiser)
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    block = torch.tensor([at // length for at in range(-len(prompt), TOKENS)])
    if blocks_from == "whole_prompt":
        block = block.clamp(min=-1)
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


@pytest.mark.parametrize(
    ("blocks_from", "cache", "length"),
    [*product(["whole_prompt"], ["none", "block_causal"], [6, 4, 32]), *product(["answer"], ["none", "exact"], [6, 4])],
)
def test_against_the_network_driven_by_hand(blocks_from: BlocksFrom, cache: str, length: int) -> None:
    result = generate(blocks_from, cache=cache, blocks={"name": "fixed", "length": length})
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt, length, blocks_from)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map


def test_it_is_neither_the_causal_context_nor_the_grid_of_the_row() -> None:
    ours = generate(cache="none").tokens
    context = toys.sampler("context", scheduler=SURE).generate(PROMPTS, max_new_tokens=TOKENS)
    assert not torch.equal(ours, context.tokens)
    found = [ours, *(generate(other).tokens for other in ("text", "answer"))]
    assert not any(torch.equal(one, other) for one, other in combinations(found, 2))
    whole = [[7, 1, 30] * 4, [8, 20] * 3]  # a number of blocks
    text, answer = (sampler(kind).generate(whole, max_new_tokens=TOKENS) for kind in ("text", "answer"))
    assert_same(text, answer)


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


@pytest.mark.parametrize("blocks_from", ["whole_prompt", "answer"])
def test_a_row_of_a_batch_is_the_row_alone(blocks_from: BlocksFrom) -> None:
    batch, made = generate(blocks_from, temperature=0.8), sampler(blocks_from, temperature=0.8)
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


@pytest.mark.parametrize("blocks_from", ["whole_prompt", "answer"])
def test_what_is_refused(blocks_from: BlocksFrom) -> None:
    with refused("plugins-incompatible: blocks=fixed"):
        sampler(blocks_from, blocks="full")
    with refused("trajectories-unsupported"):
        check(sampler(blocks_from))
    with refused("given-unsupported"):
        sampler(blocks_from).generate([Infill([FREE] * 6 + [4], [1] * 5)])
    sampler(blocks_from).generate([Infill([FREE] * 5 + [4, FREE], [1] * 5)])  # in the gap's own block


def test_the_setting_of_a_model() -> None:
    folder = CHECKPOINTS / "tiny-nemotron-labs-diffusion"
    made = Sampler.from_pretrained({"path": str(folder), "causal_context": False}, device="cpu")
    spec = made.denoiser.spec
    assert (spec.attention, spec.blocks_from, spec.seeds) == ("block_causal", "whole_prompt", False)
    for given in (None, True):
        spec = loading.load(folder, device="cpu", causal_context=given).denoiser.spec
        assert (spec.attention, spec.blocks_from, spec.seeds) == ("causal_context", "text", True)
    assert config.model("nemotron-labs-diffusion-8b")["causal_context"] is True
    with refused("option-not-applicable: model.causal_context"):
        loading.load(CHECKPOINTS / "tiny-llada", device="cpu", causal_context=False)


def test_blocks_that_no_checkpoint_says() -> None:
    """Tiny-A2D: the same files are a model that sees everything, or one that sees blocks."""
    folder = CHECKPOINTS / "tiny-a2d-qwen3"
    options: dict[str, Any] = {"device": "cpu", "mask_id": 197}
    assert loading.load(folder, **options).denoiser.spec.attention == "bidirectional"
    for wanted in ("answer", "text"):
        spec = loading.load(folder, **options, block_length=8, blocks_from=wanted).denoiser.spec
        assert (spec.attention, spec.block_length, spec.blocks_from) == ("block_causal", 8, wanted)
    made = Sampler.from_pretrained({"path": str(folder), "mask_id": 197, "block_length": 8}, device="cpu")
    assert made.spec.blocks_from == "answer" and made.plugins.blocks.grid == 8
    assert isinstance(made.plugins.cache, BlockCausalCache)
    for name in ("qwen3-0.6b", "qwen2.5-coder-0.5b"):
        assert config.model(f"a2d-{name}-bd3lm")["block_length"] == 32
        assert config.model(f"a2d-{name}-mdlm")["block_length"] is None
    with refused("option-not-applicable: model.block_length=8"):
        loading.load(CHECKPOINTS / "tiny-llada", device="cpu", block_length=8)
    with refused("option-not-applicable: model.block_length=8"):
        loading.load(CHECKPOINTS / "tiny-modernbert-chat", device="cpu", block_length=8)
    with refused("option-not-applicable: model.blocks_from=text"):
        loading.load(folder, **options, blocks_from="text")
    with refused("choice-unknown: model.blocks_from"):
        loading.load(folder, **options, block_length=8, blocks_from="prompt")
    with refused("option-range: model.block_length"):
        loading.load(folder, **options, block_length=0)
