"""The networks of block-causal families and of LLaDA-MoE against recorded logits, plain and cached."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_sampler import Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.sub_block import SubBlockCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.values import Canvas, Edit, Grid, Query, Readout
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.engine import layout
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.loading import load
from dllm_sampler.models.moe import MoE
from tests import toys
from tests.refusals import refused
from tests.sampling import sampled_rows

DATA = Path(__file__).parent / "data"
# 286 elsewhere.
MASK = {
    "tiny-fast-dllm-v2": 198, "tiny-llada2.2-moe": 199, "tiny-nemotron-labs-diffusion": 100, "tiny-sdar-moe": 198,
    "tiny-stable-diffcoder": 5,
}  # fmt: skip
close = partial(torch.testing.assert_close, atol=1e-4, rtol=0.0)


@cache
def denoiser(name: str) -> TransformerDenoiser:
    loaded = load(DATA / name, device="cpu", mask_id=MASK.get(name, 286)).denoiser
    assert isinstance(loaded, TransformerDenoiser)
    return loaded


@cache
def reference(name: str) -> dict[str, Tensor]:
    return load_file(DATA / name / "forward.safetensors")


@pytest.mark.parametrize(
    ("name", "length", "key"),
    [
        ("tiny-sdar", 4, "b4.logits_full"),
        ("tiny-sdar", 16, "b16.logits_full"),
        ("tiny-sdar-moe", 4, "b4.logits_full"),
        ("tiny-sdar-moe", 16, "b16.logits_full"),
        ("tiny-stable-diffcoder", 4, "b4.logits_full"),
        ("tiny-stable-diffcoder", 16, "b16.logits_full"),
        ("tiny-llada2-moe", 8, "b8.logits"),
        ("tiny-llada2-moe", 16, "b16.logits"),
        ("tiny-llada2.2-moe", 8, "logits"),
        ("tiny-fast-dllm-v2", 32, "logits_full"),
    ],
)
def test_block_causal_forward(name: str, length: int, key: str) -> None:
    ids = reference(name)[f"{f'b{length}.' if key[0] == 'b' else ''}input_ids"]
    at = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = denoiser(name).transformer(ids, keys=block_causal(at, at, length))
    close(logits, reference(name)[key])
    with torch.no_grad():
        assert (denoiser(name).transformer(ids) - logits).abs().amax() > 0.1, "the mask changed nothing"


def test_llada_moe_forward() -> None:
    data = reference("tiny-llada-moe")
    with torch.no_grad():
        close(denoiser("tiny-llada-moe").transformer(data["input_ids"]), data["logits"])


def test_the_router_of_llada2() -> None:
    model, data = denoiser("tiny-llada2-moe").transformer, reference("tiny-llada2-moe")
    at = torch.arange(48)[None]
    seen: list[Tensor] = []
    moe = model.layers[-1].ffn
    assert isinstance(moe, MoE)
    hook = moe.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(data["b16.input_ids"], keys=block_causal(at, at, 16))
        hook.remove()
        hidden = seen[0].flatten(0, 1)
        close(hidden @ moe.router.weight.T, data["b16.router_logits_last_moe_layer"][0])
        _, chosen = moe.router(hidden)
    assert torch.equal(chosen.sort(-1).values, data["b16.expert_ids_last_moe_layer"][0].sort(-1).values)


def test_the_pools_of_llada2_2() -> None:
    model, data = denoiser("tiny-llada2.2-moe").transformer, reference("tiny-llada2.2-moe")
    assert (data["logits"] - data["logits_grouped"]).abs().max() > 10  # what a loader without pools would give
    at = torch.arange(24)[None]
    for number in (1, 2):
        moe = model.layers[number].ffn
        assert isinstance(moe, MoE)
        logits, together = data[f"layer{number}.router_logits"], model.together(at, None)
        with torch.no_grad():  # hidden states of which the gate makes these logits
            hidden = logits @ torch.linalg.pinv(moe.router.weight).T
            close(hidden @ moe.router.weight.T, logits)
            weight, chosen = moe.router(hidden, together)
        order = chosen.argsort(-1)
        assert torch.equal(chosen.gather(-1, order), data[f"layer{number}.expert_ids"])
        close(weight.gather(-1, order), data[f"layer{number}.expert_weights"])


def test_a_block_of_llada2_2_chooses_its_experts_alone() -> None:
    """The same tokens in a plain forward, in a batch with padding, packed, with rows and candidates around them."""
    model, data = denoiser("tiny-llada2.2-moe"), reference("tiny-llada2.2-moe")
    ids, at = data["input_ids"], torch.arange(24)[None]
    padded = torch.cat([ids.flip(1), torch.cat([ids[:, 8:16], ids[:, :16]], 1)])
    real = torch.tensor([[True] * 24, [False] * 8 + [True] * 16])
    with torch.no_grad():
        at = (at - 8).clamp(min=0).expand(2, -1)  # the first 8 share a block with what follows, but for the padding
        keys = (block_causal(at, at, 8) | ~real[..., None]) & real[:, None]
        close(model.transformer(padded, positions=at, keys=keys)[1, 8:], data["logits"][0, :16])
    plugins: dict[str, Any] = {"blocks": FixedBlocks(8), "stop": "none", "cache": "none"}
    prompts = [[24, 105, 145, 3, 19], [7] * 17]
    plain = Sampler(model, **plugins).generate(prompts, max_new_tokens=21)
    rule = {"name": "freedave", "inner": {"name": "fixed"}}
    others: dict[str, Any]
    for others in ({"cache": "block_causal"}, {"scheduler": rule}):
        made = Sampler(model, **plugins | others).generate(prompts, max_new_tokens=21)
        assert torch.equal(made.tokens, plain.tokens)
    assert (made.nfe < plain.nfe).all(), "no draft was accepted"


def test_what_llada2_2_is_refused_with() -> None:
    model = denoiser("tiny-llada2.2-moe")
    with refused("plugins-incompatible: blocks.length=8"):
        Sampler(model, blocks={"name": "fixed", "length": 12})
    with refused("plugins-incompatible: scheduler=wino"):
        Sampler(model, scheduler="wino", cache="none")
    assert Sampler(model, blocks={"name": "fixed", "length": 16}).plugins.blocks.grid == 16


def at_last_block(model: TransformerDenoiser, ids: Tensor, length: int) -> Canvas:
    """The canvas of a generation of which the last block is left, whatever it holds by now."""
    prompt, total = ids[0, :-length].tolist(), ids.shape[1]
    blocks = FixedBlocks(length).bind(toys.context(model.spec))
    canvas = layout.canvas([prompt], length, [0], model.spec, blocks, CounterNoise(), False)
    assert (int(canvas.start), int(canvas.stop), canvas.layout.grid) == (total - length, total, Grid(length))
    return replace(canvas, ids=torch.cat([ids, canvas.ids[:, -1:]], 1))


def test_the_experts_of_sdar_moe() -> None:
    model, data = denoiser("tiny-sdar-moe").transformer, reference("tiny-sdar-moe")
    moe = model.layers[int(data["moe.layer"])].ffn
    assert isinstance(moe, MoE)
    with torch.no_grad():
        close(data["moe.hidden"][0] @ moe.router.weight.T, data["moe.router_logits"])
        close(moe(data["moe.hidden"]), data["moe.output"])


@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-sdar-moe", "tiny-stable-diffcoder"])
def test_cached_forward(name: str, length: int) -> None:
    model, data = denoiser(name), reference(name)
    canvas = at_last_block(model, data[f"b{length}.input_ids"], length)
    query = Query.window(canvas)
    wanted = data[f"b{length}.logits_cached_last_block"]
    live = BlockCausalCache().init(canvas, model.spec)
    nothing = Edit(query.ids[:, 0], torch.zeros_like(query.ids[:, 0], dtype=torch.bool))
    blank = Readout(query.ids, query.ids.double())
    for forward in range(2):  # the first one stores the prompt, the second one reads it
        plan = toys.planned(canvas, query, model.spec, live)
        assert int(plan.entries) == (length if forward else 48)
        hidden, _ = model(canvas, query, plan)
        close(model.head(hidden), wanted[0])
        live.observe(canvas, query, nothing, blank)
        canvas = replace(canvas, age=canvas.age + 1)
    assert live.slots is not None
    close(live.slots.read(0, 48 - length)[0], data[f"b{length}.cache_key_layer0"])
    plan = toys.planned(canvas, query, model.spec)
    hidden, _ = model(canvas, query, plan)
    close(model.head(hidden), wanted[0])


def test_fast_dllm_v2_cached_forwards() -> None:
    """The last block against stored ones, its first position by the row before it; then a part against stale keys."""
    model, data = denoiser("tiny-fast-dllm-v2"), reference("tiny-fast-dllm-v2")
    canvas = at_last_block(model, data["input_ids"], 32)
    query = Query.window(canvas)
    wanted = torch.cat([data["logits_full"][:, 63:64], data["logits_cached_last_block"][:, :-1]], 1)
    live, none = SubBlockCache().init(canvas, model.spec), torch.zeros_like(query.ids[:, 0], dtype=torch.bool)
    blank = Readout(query.ids, query.ids.double())
    for forward in range(2):
        plan = toys.planned(canvas, query, model.spec, live)
        assert int(plan.entries) == (33 if forward else 96)
        hidden, _ = model(canvas, query, plan)
        close(model.head(hidden), wanted[0])
        live.observe(canvas, query, Edit(query.ids[:, 0], none), blank)
        canvas = replace(canvas, age=canvas.age + 1)
    assert live.slots is not None
    for layer in (0, 1):
        close(live.slots.read(layer, 64)[0], data[f"cache_key_layer{layer}"])

    ids = torch.cat([data["sub_block.input_ids"], canvas.ids[:, -1:]], 1)
    masked = canvas.masked & (canvas.columns() >= 73)  # the second quarter but for its first position, and what follows
    start = torch.tensor([73])
    assert canvas.layout.grid is not None
    grid = replace(canvas.layout.grid, part=8)
    canvas = toys.changed(canvas, ids=ids, masked=masked, start=start, stop=start + 7, grid=grid)
    query = Query.window(canvas)
    plan = toys.planned(canvas, query, model.spec, live)
    assert int(plan.entries) == 8
    hidden, _ = model(canvas, query, plan)
    close(model.head(hidden), data["sub_block.logits"][0, :-1])


def test_the_blocks_of_bd3lm() -> None:
    """Prompts of 13 and 6, cut into blocks of 8 from their end, and one block; recorded rows are padded at the left."""
    data = reference("tiny-a2d-qwen3")
    model = load(DATA / "tiny-a2d-qwen3", device="cpu", mask_id=197, block_length=8).denoiser
    real = data["block.attention_mask"][:, 0].any(-1)
    rows = [row[there].tolist() for row, there in zip(data["block.input_ids"], real, strict=True)]
    blocks = FixedBlocks().bind(toys.context(model.spec))
    canvas = layout.canvas([row[:-8] for row in rows], 8, [0, 0], model.spec, blocks, CounterNoise(), False)
    answers = torch.tensor([row[-8:] for row in rows])
    canvas = replace(canvas, ids=canvas.ids.scatter(1, canvas.answer(), answers))
    query = Query.window(canvas)
    live, none = BlockCausalCache().init(canvas, model.spec), torch.zeros_like(answers, dtype=torch.bool)
    for forward, key in enumerate(("block.logits", "block.logits_cached")):
        plan = toys.planned(canvas, query, model.spec, live)
        assert plan.entries.tolist() == [8, 8] if forward else [21, 14]
        hidden, _ = model(canvas, query, plan)
        close(plan.head_rows.spread(model.head(hidden))[:, 0], data[key][:, -8:])
        live.observe(canvas, query, Edit(answers, none), Readout(query.ids, query.ids.double()))
        canvas = replace(canvas, age=canvas.age + 1)


def test_nemotron() -> None:
    """Its three modes: a causal pass, a block against that context, everything at once."""
    model, data = denoiser("tiny-nemotron-labs-diffusion"), reference("tiny-nemotron-labs-diffusion")
    text, ids = data["causal.input_ids"], torch.cat([data["causal.input_ids"], data["block.input_ids"]], 1)
    close(model.transformer.rope(torch.arange(80)[None], torch.float32).scale.flatten(), data["query_scale"])  # pyright: ignore
    with torch.no_grad():
        close(model.transformer(text, keys=torch.ones(1, 64, 64).tril().bool()), data["causal.logits"])
        close(model.transformer(data["bidirectional.input_ids"]), data["bidirectional.logits"])
    blocks = FixedBlocks(16).bind(toys.context(model.spec))
    canvas = layout.canvas([text[0].tolist()], 16, [0], model.spec, blocks, CounterNoise(), False)
    canvas = replace(canvas, ids=torch.cat([ids, canvas.ids[:, -1:]], 1))
    query = Query.window(canvas)
    wanted = torch.cat([data["causal.logits"][:, -1:], data["block.logits"][:, 1:]], 1)  # the context's row comes first
    live, none = BlockCausalCache().init(canvas, model.spec), torch.zeros_like(query.ids[:, 0], dtype=torch.bool)
    blank = Readout(query.ids, query.ids.double())
    for forward in range(2):
        plan = toys.planned(canvas, query, model.spec, live)
        assert int(plan.entries) == (17 if forward else 80)
        hidden, _ = model(canvas, query, plan)
        close(model.head(hidden), wanted[0])
        live.observe(canvas, query, Edit(query.ids[:, 0], none), blank)
        canvas = replace(canvas, age=canvas.age + 1)
    assert live.slots is not None
    close(live.slots.read(0, 64)[0], data["causal.cache_key_layer0"])
    plan = toys.planned(canvas, query, model.spec)
    hidden, _ = model(canvas, query, plan)
    close(model.head(hidden), wanted[0])


@pytest.mark.parametrize(
    ("name", "length"),
    sampled_rows(
        [("tiny-sdar", 4), ("tiny-llada2-moe", 32), ("tiny-stable-diffcoder", 4), ("tiny-fast-dllm-v2", 32)],
        lambda row: [row[1]],
    ),
)
def test_a_user_needs_to_say_nothing(name: str, length: int) -> None:
    path = {"path": str(DATA / name), "mask_id": MASK.get(name, 286)}
    sampler = Sampler.from_pretrained(path, device="cpu")
    assert isinstance(sampler.plugins.cache, BlockCausalCache)
    assert sampler.plugins.blocks.grid == length
    prompts = [[6, 11, 3, 40, 41], [7]]
    result = sampler.generate(prompts, max_new_tokens=21)
    assert result.complete.all()
    plain = Sampler.from_pretrained(path, device="cpu", cache="none")
    assert torch.equal(plain.generate(prompts, max_new_tokens=21).tokens, result.tokens)


def test_token_editing_on_llada2() -> None:
    rule = {"name": "editing", "threshold": 0.3, "edit": 0.2}
    made = [
        Sampler(denoiser("tiny-llada2-moe"), scheduler=chosen, cache=cached, blocks=FixedBlocks(8), stop="none")
        for chosen, cached in ((rule, "none"), (rule, "block_causal"), (rule | {"edit": 1.0}, "block_causal"))
    ]
    plain, cached, frozen = (sampler.generate([[21, 19, 40, 13, 103], [12, 14]], max_new_tokens=32) for sampler in made)
    assert torch.equal(plain.tokens, cached.tokens) and torch.equal(plain.nfe, cached.nfe)
    assert not torch.equal(cached.tokens, frozen.tokens), "nothing was edited"
