"""Experts: who is chosen, that grouping rows changes nothing, and checkpoints with fused and stacked tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dllm_sampler.models import loading
from dllm_sampler.models.adapted import SDAR, SDAR_MOE
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.families import LLADA2, LLADA_MOE, to_checkpoint
from dllm_sampler.models.family import Family
from dllm_sampler.models.moe import Experts, MoE, MoeConfig, Router
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from tests.refusals import refused
from tests.sampling import each

PLAIN = MoeConfig(num_experts=8, top_k=3, expert_size=16, layers=frozenset({0, 1}))
GROUPED = replace(PLAIN, score="sigmoid", groups=4, top_groups=2, normalise=True, scale=2.5, bias=True)


def one_by_one(experts: Experts, hidden: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for t, (weights, numbers) in enumerate(zip(weight, chosen.tolist(), strict=True)):
        for w, e in zip(weights, numbers, strict=True):
            inner = F.silu(experts.gate_proj[e] @ hidden[t]) * (experts.up_proj[e] @ hidden[t])
            out[t] += w * (experts.down_proj[e] @ inner)
    return out


@each("dtype", [torch.float32, torch.float64])
@each("size", [16, 10])  # rows of 10 numbers are not aligned for a grouped kernel
@each("grouped", [True, False])  # torch 2.8 has no grouped product
def test_grouped_rows_equal_experts_one_by_one(
    grouped: bool, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not grouped:
        monkeypatch.delattr(F, "grouped_mm", raising=False)
    torch.manual_seed(0)
    config = replace(PLAIN, expert_size=size)
    experts, router = Experts(config, 32).to(dtype), Router(config, 32).to(dtype)
    hidden = 10 * torch.randn(13, 32, dtype=dtype)
    weight, chosen = router(hidden)
    with torch.no_grad():
        torch.testing.assert_close(experts(hidden, weight, chosen), one_by_one(experts, hidden, weight, chosen))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    moe = MoE(GROUPED, 32, None).double()
    hidden = torch.randn(3, 7, 32, dtype=torch.float64)
    whole = moe(hidden)
    for row in range(3):
        assert torch.equal(moe(hidden[row : row + 1, 2:5])[0], whole[row, 2:5])


def router(config: MoeConfig, scores: list[float], bias: list[float] | None = None) -> tuple[list[float], list[int]]:
    """Weights and experts by number for one token whose logits are given."""
    made = Router(config, len(scores)).double()
    with torch.no_grad():
        made.weight.copy_(torch.diag(torch.tensor(scores, dtype=torch.float64)))
        if bias is not None and made.bias is not None:
            made.bias.copy_(torch.tensor(bias))
        weight, chosen = made(torch.ones(1, len(scores), dtype=torch.float64))
    order = chosen[0].argsort()
    return weight[0][order].tolist(), chosen[0][order].tolist()


def test_softmax_weights_are_not_normalised() -> None:
    scores = [3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    weight, chosen = router(PLAIN, scores)
    assert chosen == [0, 1, 2]
    expected = torch.tensor(scores, dtype=torch.float64).softmax(0)
    assert weight == pytest.approx(expected[:3].tolist())


def test_a_bias_on_probabilities_stays_in_the_weight() -> None:
    scores, bias = [0.0] * 8, [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3]
    weight, chosen = router(replace(PLAIN, bias=True, weigh_bias=True), scores, bias)
    assert chosen == [5, 6, 7]
    assert weight == pytest.approx([0.225, 0.325, 0.425])


def test_groups_are_chosen_by_their_two_best_and_the_bias_only_chooses() -> None:
    # Group 0 has the best expert, groups 1 and 2 the best pairs; expert 7 is good, alone in its group.
    scores = [4.0, -9.0, 2.0, 2.1, 2.2, 1.9, -9.0, 3.0]
    weight, chosen = router(GROUPED, scores)
    assert chosen == [2, 3, 4]
    own = torch.tensor([scores[i] for i in chosen], dtype=torch.float64).sigmoid()
    assert weight == pytest.approx((2.5 * own / own.sum()).tolist())
    weight, chosen = router(GROUPED, scores, [0, 0, 0, 0, 0, 0, 0.9, 0.9])
    assert 7 in chosen
    own = torch.tensor([scores[i] for i in chosen], dtype=torch.float64).sigmoid()
    assert weight == pytest.approx((2.5 * own / own.sum()).tolist())


SHAPE = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "max_position_embeddings": 64, "mask_token_id": 23, "eos_token_id": 22,
}  # fmt: skip
RAW: dict[str, dict[str, Any]] = {
    "sdar": SHAPE | {"model_type": "sdar", "intermediate_size": 20, "head_dim": 6, "attention_bias": True},
    "llada_moe": SHAPE | {
        "model_type": "llada", "expert_intermediate_size": 8, "dense_intermediate_size": 12, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_layer_freq": [0, 1], "qk_layernorm": True, "shared_expert_intermediate_size": 12,
        "moe_router_enable_expert_bias": True, "rms_norm_eps": 1e-5,
    },
    "sdar_moe": SHAPE | {
        "model_type": "sdar_moe", "intermediate_size": 20, "head_dim": 6, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "tie_word_embeddings": True, "block_size": 8,
    },
    "llada2": SHAPE | {
        "model_type": "llada2_moe", "intermediate_size": 20, "head_dim": 8, "moe_intermediate_size": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_shared_experts": 2,
        "first_k_dense_replace": 1, "use_bias": True, "use_qkv_bias": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
FAMILY = {"sdar": SDAR, "sdar_moe": SDAR_MOE, "llada_moe": LLADA_MOE, "llada2": LLADA2}


def save(folder: Path, kind: str, spoil: Callable[[dict[str, Tensor]], object] = lambda tensors: None) -> Transformer:
    family: Family = FAMILY[kind]
    torch.manual_seed(0)
    model = Transformer(family.config(RAW[kind]))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_()
    tensors = to_checkpoint(model, family)
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(RAW[kind]))
    return model


@each("kind", RAW)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path, kind)
    loaded = loading.load(tmp_path, device="cpu").denoiser
    assert isinstance(loaded, TransformerDenoiser)
    assert loaded.transformer.config == model.config
    ids = torch.randint(0, 24, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(loaded.transformer(ids), model(ids), atol=0, rtol=0)
    block_length = {"sdar": 4, "sdar_moe": 8, "llada2": 32}.get(kind)
    assert loaded.spec.block_length == block_length
    assert loaded.spec.attention == ("block_causal" if block_length else "bidirectional")


def test_which_layers_of_sdar_moe_have_experts() -> None:
    config = SDAR_MOE.config(RAW["sdar_moe"])
    assert config.moe is not None
    assert (config.moe.layers, config.moe.normalise) == ({1}, False)  # every second layer, without the fourth
    config = SDAR_MOE.config(RAW["sdar_moe"] | {"decoder_sparse_step": None, "norm_topk_prob": True})
    assert config.moe is not None
    assert (config.moe.layers, config.moe.normalise) == ({0, 1, 2, 4}, True)


def test_names_in_the_checkpoint(tmp_path: Path) -> None:
    model = Transformer(LLADA2.config(RAW["llada2"]))
    shapes = {name: list(tensor.shape) for name, tensor in to_checkpoint(model, LLADA2).items()}
    assert shapes["model.layers.0.attention.query_key_value.weight"] == [64, 16]
    assert shapes["model.layers.0.attention.query_key_value.bias"] == [64]
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == [20, 16]
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == [16, 8]
    assert shapes["model.layers.1.mlp.gate.expert_bias"] == [4]
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == [16, 16]
    assert shapes["model.word_embeddings.weight"] == [24, 16]
    fused = to_checkpoint(model, LLADA2)["model.layers.1.attention.query_key_value.weight"]
    layer: Any = model.layers[1]
    assert torch.equal(fused, torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FUSED = "model.layers.0.attention.query_key_value.weight"


@each(
    ("spoil", "named"),
    [
        (lambda t: t.pop(EXPERT), EXPERT),
        (lambda t: t.pop(FUSED), FUSED),
        (lambda t: t.update({EXPERT.replace("2", "4"): t[EXPERT].clone()}), "experts.4.up_proj"),
        (lambda t: t.update({EXPERT: torch.ones(8, 15)}), f"{EXPERT}, [8, 15], [8, 16]"),
        (lambda t: t.update({FUSED: torch.ones(32, 16)}), f"{FUSED}, [32, 16], [64, 16]"),
    ],
)
def test_damage_is_refused(tmp_path: Path, spoil: Callable[[dict[str, Tensor]], object], named: str) -> None:
    save(tmp_path, "llada2", spoil)
    with refused(f"checkpoint-tensors: {named}"):
        loading.load(tmp_path, device="cpu")


@each(
    ("kind", "changes", "sentence"),
    [
        ("llada2", {"n_group": 3}, "checkpoint-config-invalid: config.json"),
        ("llada2", {"num_experts_per_tok": 3}, "checkpoint-config-invalid: config.json"),
        ("llada2", {"partial_rotary_factor": 0.4}, "checkpoint-config-invalid: partial_rotary_factor, ="),
        ("llada2", {"score_function": "softmax"}, 'checkpoint-unsupported: score_function, =, "softmax"'),
        ("llada_moe", {"moe_layer_freq": [1]}, "checkpoint-config-invalid: config.json"),
        ("llada_moe", {"num_experts": None}, "checkpoint-config-invalid: num_experts"),
        ("sdar_moe", {"mlp_only_layers": [5]}, "checkpoint-config-invalid: mlp_only_layers, [5]"),
        ("sdar_moe", {"mlp_only_layers": 3}, "checkpoint-config-invalid: mlp_only_layers"),
        ("sdar_moe", {"num_experts_per_tok": 5}, "checkpoint-config-invalid: config.json"),
        ("sdar", {"head_dim": 5}, "checkpoint-config-invalid: head_dim"),
        ("sdar", {"block_size": 0}, "checkpoint-config-invalid: block_size"),
        ("sdar", {"mask_token_id": None}, "mask-token-missing: mask_token_id, model.mask_id"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any], sentence: str) -> None:
    save(tmp_path, kind)
    (tmp_path / "config.json").write_text(json.dumps(RAW[kind] | changes))
    with refused(sentence):
        loading.load(tmp_path, device="cpu")


def test_special_tokens(tmp_path: Path) -> None:
    save(tmp_path, "sdar")
    (tmp_path / "config.json").write_text(json.dumps(RAW["sdar"] | {"mask_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [20, 22]}))
    spec = loading.load(tmp_path, device="cpu", mask_id=21).denoiser.spec
    assert (spec.mask_id, spec.eos_id) == (21, 20), "a chat ends with the generation config's token"
    with refused("token-outside-vocabulary: mask_id, 24"):
        loading.load(tmp_path, device="cpu", mask_id=24)


def test_partly_rotated_heads() -> None:
    config = TransformerConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
        rotary_dim=4,
    )  # fmt: skip
    model = Transformer(config)
    heads = torch.randn(1, 2, 3, 8)
    turned = model.rope(torch.arange(3)[None], torch.float32).rotate(heads)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    whole = Transformer(replace(config, head_dim=4, rotary_dim=None)).rope(torch.arange(3)[None], torch.float32)
    assert torch.equal(turned[..., :4], whole.rotate(heads[..., :4]))
