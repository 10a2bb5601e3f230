"""A `config.json`: published ones load, no value that computes is ignored, and absurd numbers are refused."""

import json
import math
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, Qwen2Config

from dllm_sampler.cli.main import main
from dllm_sampler.errors import NoEffectWarning, UserError
from dllm_sampler.models import diffusion_gemma, huggingface, loading
from dllm_sampler.models.adapted import (
    A2D_LLAMA,
    A2D_QWEN2,
    A2D_QWEN3,
    FAST_DLLM,
    RND1,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
)
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.families import DREAM, FAMILIES, ILLADA, LLADA, LLADA2, LLADA_MOE, to_checkpoint
from dllm_sampler.models.family import Family
from dllm_sampler.models.huggingface import unread
from dllm_sampler.models.nemotron import NEMOTRON
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.models.yarn import Yarn
from tests import tiny
from tests.refusals import refused
from tests.sampling import each, few

# What a `config.json` may say: published ones load, and no value that computes is ignored


SAVED: dict[str, Any] = {  # what transformers writes into every file, old and new versions
    "_name_or_path": "/data/run-7/checkpoint", "attention_dropout": 0.0, "auto_map": {"AutoConfig": "config.Config"},
    "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 6, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "initializer_range": 0.02, "id2label": {"0": "LABEL_0"},
    "chunk_size_feed_forward": 0, "output_hidden_states": False, "return_dict": True, "top_k": 50, "temperature": 1.0,
    "num_beams": 1, "max_length": 20, "is_decoder": False, "problem_type": None, "attn_implementation": "sdpa",
    "pretraining_tp": 1, "tokenizer_class": None, "unsloth_fixed": True, "task_specific_params": None,
}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
    "sliding_window": 4096, "use_sliding_window": False, "tie_word_embeddings": False, "max_position_embeddings": 32768,
}  # fmt: skip
# The fields of the published files, as the families' own code writes them.
PUBLISHED: dict[str, tuple[Family, dict[str, Any]]] = {
    "LLaDA-8B": (LLADA, {
        "model_type": "llada", "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0,
        "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False,
        "block_group_size": 1, "block_type": "llama", "d_model": 4096, "embedding_dropout": 0.0,
        "embedding_size": 126464, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
        "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02,
        "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 126336,
        "max_sequence_length": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4, "multi_query_attention": None,
        "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "precision": "amp_bf16", "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5, "rope": True, "rope_full_precision": True, "rope_theta": 5e5, "scale_logits": False,
        "vocab_size": 126464, "weight_tying": False, "tie_word_embeddings": False,
    }),
    "Dream-7B": (DREAM, QWEN | {
        "model_type": "Dream", "hidden_size": 3584, "intermediate_size": 18944, "mask_token_id": 151666,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "sliding_window": None, "use_mrope": False, "layer_types": ["full_attention"] * 28,
    }),
    "SDAR-8B": (SDAR, QWEN | {
        "model_type": "sdar", "attention_bias": False, "block_size": 4, "debug": False, "ep_size": 1, "head_dim": 128,
        "fuse_cross_entropy": True, "hidden_size": 4096, "intermediate_size": 12288, "mask_token_id": 151669,
        "micro_forward": False, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "skip_checkpoint": False, "use_deepep": False, "vocab_size": 151936,
    }),
    "iLLaDA-8B": (ILLADA, {  # these fields are those that its network reads: the published file could not be had
        "model_type": "illada", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "layer_norm_eps": None, "max_position_embeddings": 8192, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5e5, "vocab_size": 155136,
    }),
    "SDAR-30B-A3B": (SDAR_MOE, QWEN | {  # as three ports of it and its parent have it
        "model_type": "sdar_moe", "attention_bias": False, "block_size": 4, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "mask_token_id": 151669, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "vocab_size": 151936, "sliding_window": None,
    }),
    "Stable-DiffCoder-8B": (STABLE_DIFFCODER, {  # as a port of it has it
        "architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama", "attention_bias": False,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5e5,
        "tie_word_embeddings": False, "vocab_size": 155136,
    }),
    "Fast-dLLM-v2-7B": (FAST_DLLM, QWEN | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 32,
        "hidden_size": 3584, "intermediate_size": 18944, "layer_types": ["full_attention"] * 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": None,
        "use_cache": False, "vocab_size": 152064,
    }),
    "Nemotron-Labs-Diffusion-8B": (NEMOTRON, {  # as a walk-through of it has it
        "architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion",
        "ar_loss_weight": 1.0, "attention_bias": False, "block_size": 32, "dlm_loss_weight": None,
        "dlm_paradigm": "bidirectional", "dp_varying_mask_ratio": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "mask_token_id": 100, "max_position_embeddings": 262144,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6, "rope_type": "yarn",
        },
    }),
    "LLaDA-MoE": (LLADA_MOE, {
        "model_type": "llada", "attention_bias": False, "clip_qkv": None, "dense_intermediate_size": 8192,
        "expert_intermediate_size": 1024, "hidden_act": "silu", "hidden_size": 2048, "max_position_embeddings": 8192,
        "moe_layer_freq": [1] * 16, "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
        "norm_topk_prob": None, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "partial_rotary_factor": 1,
        "qk_layernorm": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 50000,
        "routed_scaling_factor": 1, "router_aux_loss_coef": 0.01, "router_num_group": None, "router_topk_group": None,
        "shared_expert_intermediate_size": None, "tie_word_embeddings": False, "vocab_size": 157184,
    }),
    "LLaDA2.1": (LLADA2, QWEN | {
        "model_type": "llada2_moe", "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "n_group": 8, "norm_head": False,
        "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4, "num_shared_experts": 1,
        "output_dropout": 0.0, "output_router_logits": False, "partial_rotary_factor": 0.5, "rotary_dim": 64,
        "rope_theta": 600000, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
        "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
        "moe_shared_expert_intermediate_size": 512, "num_nextn_predict_layers": 0, "mtp_loss_scaling_factor": 0,
        "vocab_size": 157184, "delete_token_id": 156930, "split_token_id": 156931,
    }),
    "Qwen3-0.6B-diffusion": (A2D_QWEN3, QWEN | {  # its parent's: the published files could not be had, nor the next
        "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "attention_bias": False, "head_dim": 128,
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
        "layer_types": ["full_attention"] * 28, "num_key_value_heads": 8, "sliding_window": None,
        "tie_word_embeddings": True, "vocab_size": 151936,
    }),
    "Qwen2.5-Coder-0.5B-Instruct-diffusion": (A2D_QWEN2, QWEN | {
        "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2", "hidden_size": 896,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "layer_types": ["full_attention"] * 24, "sliding_window": None, "tie_word_embeddings": True,
        "vocab_size": 151936,
    }),
    "A2D-Llama-8B": (A2D_LLAMA, {  # there is none: those of Llama 3
        "architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5e5,
        "tie_word_embeddings": False, "vocab_size": 128256,
    }),
    "RND1-Base-0910": (RND1, QWEN | {  # as its config class writes it
        "architectures": ["RND1LM"], "model_type": "rnd1", "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "is_causal": False, "mask_token_id": 151669,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_backend": "hf", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_diffusion_steps": 256, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rope_scaling": False, "router_aux_loss_coef": 0.001, "sliding_window": False, "vocab_size": 151936,
    }),
}  # fmt: skip
NAMES = list(PUBLISHED)


def config(name: str, **changes: Any) -> Any:
    family, raw = PUBLISHED[name]
    return family.config(SAVED | raw | changes)


def test_there_is_a_published_file_of_every_family():
    assert {family.name for family, _ in PUBLISHED.values()} == {family.name for family in FAMILIES}


@each("name", NAMES)
def test_published_files_are_understood_without_a_word(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config(name).num_layers >= 16


COMPUTES: list[tuple[str, Any]] = [  # what no family implements
    ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("logits_soft_cap", 30),
    ("logit_scale", 0.0625), ("logits_scaling", 8.0), ("embedding_multiplier", 12.0), ("residual_multiplier", 0.22),
    ("attention_multiplier", 0.01), ("query_pre_attn_scalar", 256), ("use_mup", True), ("use_sliding_window", True),
    ("layer_types", ["sliding_attention", "full_attention"]), ("attention_chunk_size", 8192),
    ("quantization_config", {"quant_method": "fp8"}), ("kv_lora_rank", 512),
    ("moe_router_group_limit", 2), ("layernorm_type", "layernorm"), ("hidden_activation", "gelu_pytorch_tanh"),
    ("num_memory_tokens", 4), ("alibi", True), ("causal", True), ("use_mrope", True), ("attention_sink", 4),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}), ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "llama3"}), ("rope_scaling", {"rope_type": "longrope"}),
    ("rope_scaling", {"rope_type": "dynamic"}), ("rope_scaling", {"factor": 2.0}), ("rope_scaling", 4.0),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}), ("rope_scaling", "default"),
    ("rope_scaling", {"rope_type": None, "type": "linear"}),
    ("rope_scaling", {"rope_type": "default", "type": "yarn"}),
    ("use_rope", False), ("use_rotary_embedding", False), ("use_rmsnorm", False), ("swiglu", False),
    ("output_multiplier_scale", 0.577), ("output_gate", True), ("mlp_type", "gelu"), ("ffn_dim", 7),
    ("feedforward_type", "relu"), ("dim_model_base", 256), ("nonlinearity", "relu"),
    ("rope_parameters", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_computes_is_refused_by_name(name: str, subtests: pytest.Subtests):
    for key, value in COMPUTES:
        if key in PUBLISHED[name][0].ignored:
            continue  # published code ignores it, too
        with subtests.test(key, value=value):
            with refused(f"checkpoint-unsupported: {key}") as caught:
                config(name, **{key: value})
            assert "\n" not in str(caught.value)


REFUSED: list[tuple[str, str, Any]] = [
    ("LLaDA-8B", "partial_rotary_factor", 0.5), ("Dream-7B", "partial_rotary_factor", 0.5),
    ("SDAR-8B", "rope_parameters", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
    ("LLaDA-8B", "sliding_window", 4096), ("LLaDA-8B", "rope", 1), ("LLaDA-MoE", "sliding_window", 4096),
    ("LLaDA-MoE", "norm_topk_prob", True), ("LLaDA-MoE", "routed_scaling_factor", 2.5),
    ("LLaDA2.1", "norm_topk_prob", False), ("LLaDA2.1", "score_function", "softmax"),
    ("LLaDA2.1", "norm_head", True),
    ("LLaDA2.1", "router_dtype", "bf16"), ("LLaDA2.1", "use_rmsnorm", False), ("Dream-7B", "block_size", 32),
    *((name, "expert_capacity", 48) for name in NAMES if name != "LLaDA2.1"),
    ("Dream-7B", "hidden_act", "gelu"), ("SDAR-8B", "qk_norm", "l2"),
    ("iLLaDA-8B", "layer_norm_eps", 1e-5), ("iLLaDA-8B", "mlp_bias", True), ("iLLaDA-8B", "sliding_window", 4096),
    ("SDAR-30B-A3B", "router_n_groups", 4), ("SDAR-30B-A3B", "moe_router_enable_expert_bias", True),
    ("Stable-DiffCoder-8B", "mlp_bias", True), ("Stable-DiffCoder-8B", "sliding_window", 4096),
    ("Stable-DiffCoder-8B", "block_size", 32), ("Fast-dLLM-v2-7B", "block_size", 16),
]  # fmt: skip


def test_values_of_one_family_that_are_refused(subtests: pytest.Subtests):
    for name, key, value in REFUSED:
        with subtests.test(f"{name} {key}", value=value), refused("checkpoint-unsupported: config.json"):
            config(name, **{key: value})


def test_llada2_2_has_a_pool_of_experts_for_each_block():
    moe = config("LLaDA2.1", expert_capacity=48, block_size=32).moe
    assert (moe.pool, moe.block, moe.groups, moe.top_k) == (48, 32, 1, 8)
    assert (config("LLaDA2.1").moe.pool, config("LLaDA2.1").moe.groups) == (0, 8)
    for capacity in (7, 257):
        with refused(f"checkpoint-config-invalid: expert_capacity, 256, {capacity}"):
            config("LLaDA2.1", expert_capacity=capacity)


def test_stretched_positions():
    raw, name = PUBLISHED["Nemotron-Labs-Diffusion-8B"][1]["rope_parameters"], "Nemotron-Labs-Diffusion-8B"
    assert config(name).yarn == Yarn(16.0, 16384, 32.0, 1.0, 0.1) and config(name).rope_theta == 1e6
    assert config(name, rope_parameters=raw | {"llama_4_scaling_beta": None}).yarn.queries == 0
    assert config(name, rope_parameters=None, rope_scaling=raw) == config(name)
    assert config(name, rope_parameters=None, rope_theta=5e5).yarn is None
    wrong = [
        ({"mscale": 0.7}, "checkpoint-unsupported: mscale_all_dim"),
        ({"mscale": None, "mscale_all_dim": None}, "checkpoint-unsupported: mscale_all_dim"),
        ({"truncate": True}, "checkpoint-unsupported: rope_parameters, ="),
        ({"factor": -4}, "checkpoint-config-invalid: rope_parameters"),
        ({"original_max_position_embeddings": 0}, "checkpoint-config-invalid: original_max_position_embeddings"),
        ({"rope_theta": 1}, "checkpoint-config-invalid: rope_parameters, rope_theta"),
    ]
    for change, sentence in wrong:
        with refused(sentence):
            config(name, rope_parameters=raw | change)
    with refused("checkpoint-config-invalid: rope_parameters.rope_theta"):
        config(name, rope_theta=10.0)


def test_an_architecture_tells_a_family_from_other_models_of_its_type():
    raw = PUBLISHED["Stable-DiffCoder-8B"][1]
    assert loading.find_family(raw, Path()) is STABLE_DIFFCODER
    for named in (["LlamaForCausalLM"], "StableDiffcoderForCausalLM", None):
        assert not STABLE_DIFFCODER.knows("llama", raw | {"architectures": named})


def test_an_unknown_field_that_names_nothing_of_a_network_is_told():
    with pytest.warns(UserWarning, match=r"has 2 unknown fields without effect: wandb_run, curriculum\. "):
        config("SDAR-8B", wandb_run="a1", curriculum={"stage": 2}, license="", seed=0)


def test_the_command_tells_unknown_fields_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path, "llada", wandb_run="a1")
    assert main(["a", f"model={tmp_path}", "max_new_tokens=2", "device=cpu"]) == 2, "it has no tokenizer"
    assert "config.json has 1 unknown field without effect: wandb_run." in capsys.readouterr().err


def test_rotary_positions_are_read_wherever_they_stand():
    for name in NAMES:
        family, raw = PUBLISHED[name]
        if "rope_theta" not in raw:
            continue  # its positions are scaled, and stand in one place
        plain = config(name)
        moved = {key: value for key, value in raw.items() if key not in ("rope_theta", "partial_rotary_factor")}
        said = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
        if "partial_rotary_factor" in raw:
            said["partial_rotary_factor"] = raw["partial_rotary_factor"]
        assert family.config(moved | {"rope_parameters": said}) == plain
        with refused("checkpoint-config-invalid: =, rope_parameters.rope_theta"):
            config(name, rope_parameters={"rope_theta": 7.0})
    with refused("checkpoint-config-invalid: rotary_dim, partial_rotary_factor"):
        config("LLaDA2.1", rotary_dim=32)


def test_fields_of_llada2_have_an_effect():
    family, raw = PUBLISHED["LLaDA2.1"]
    assert config("LLaDA2.1", num_shared_experts=2, moe_shared_expert_intermediate_size=96).moe.shared_size == 192
    assert config("LLaDA2.1", num_shared_experts=2, moe_shared_expert_intermediate_size=None).moe.shared_size == 1024
    with refused("checkpoint-config-invalid: 65536, 32768"):
        family.config(raw | {"block_size": 65536})


SMALL: dict[str, Any] = {
    "model_type": "llada2_moe", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20, "moe_intermediate_size": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "use_bias": False,
    "max_position_embeddings": 64, "mask_token_id": 23, "eos_token_id": 22,
}  # fmt: skip
LLADA_SMALL: dict[str, Any] = {
    "model_type": "llada", "vocab_size": 24, "embedding_size": 24, "d_model": 16, "n_layers": 2, "n_heads": 4,
    "n_kv_heads": 2, "mlp_hidden_size": 20, "max_sequence_length": 64, "mask_token_id": 23, "eos_token_id": 22,
}  # fmt: skip
FOLDERS = {"llada2": (LLADA2, SMALL), "llada": (LLADA, LLADA_SMALL)}


def save(folder: Path, kind: str = "llada2", **changes: Any) -> None:
    family, raw = FOLDERS[kind]
    save_file(to_checkpoint(Transformer(family.config(raw)), family), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | changes))


@each(("said", "length"), [({}, 32), ({"block_size": 16}, 16)])
def test_blocks_are_as_long_as_the_file_says(tmp_path: Path, said: dict[str, Any], length: int):
    save(tmp_path, **said)
    denoiser = loading.load(tmp_path, device="cpu").denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    assert denoiser.spec.block_length == length


def test_tied_heads_by_the_name_of_another_family():
    for name in NAMES:
        if name != "LLaDA-8B":
            with refused("checkpoint-unsupported: weight_tying, ="):
                config(name, weight_tying=True)


# Numbers of a `config.json` that describe no network, and fields of it that a class of transformers ignores


needs_gemma = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="this transformers has no DiffusionGemma"
)

ABSURD = [2**31, 10**18, 10**400, -1, 1.5, "x", True, math.nan, math.inf, 1e308, 1e-320, [], {"a": 1}, [2**31]]
SIZES = [
    (kind, key) for kind, (_, raw) in FOLDERS.items() for key in raw if key not in ("model_type", "use_bias")
] + [("llada2", "rope_theta"), ("llada2", "rms_norm_eps"), ("llada2", "routed_scaling_factor"),
     ("llada2", "block_size"), ("llada2", "partial_rotary_factor"), ("llada2", "num_shared_experts"),
     ("llada", "mlp_ratio"), ("llada2", "moe_shared_expert_intermediate_size"), ("llada", "rope_theta")]  # fmt: skip
FRACTIONS = ("rope_theta", "rms_norm_eps", "routed_scaling_factor", "partial_rotary_factor")  # 1.5 is one


@few("kind", FOLDERS)
def test_absurd_numbers_are_one_sentence_before_anything_is_built(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, kind)

    def build(_: object) -> None:
        raise AssertionError("a network was built")

    monkeypatch.setattr(loading, "Transformer", build)
    raw = FOLDERS[kind][1]
    for key in (key for which, key in SIZES if which == kind):
        for value in ABSURD:
            if (key in FRACTIONS and value in (1.5, 1e-320, 2**31)) or (key.endswith("_id") and value != 10**400):
                continue
            (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
            begun = time.perf_counter()
            with pytest.raises((UserError, AssertionError)) as caught:
                loading.load(tmp_path, device="cpu")
            if not key.endswith("_id"):  # tokens are compared with the vocabulary of the network
                assert caught.type is UserError, (key, value)
            assert key in str(caught.value) or key.endswith("_id"), (key, value, caught.value)
            assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
            assert time.perf_counter() - begun < 1


def test_more_layers_than_the_tensors_make(tmp_path: Path):
    save(tmp_path, num_hidden_layers=3)
    with refused("checkpoint-config-invalid: num_hidden_layers"):
        loading.load(tmp_path, device="cpu")


def test_sizes_whose_product_is_no_tensor_are_one_sentence(tmp_path: Path):
    """Each alone has room in the large tensor that the checkpoint holds beside the others."""
    save(tmp_path, "llada", d_model=2**20, embedding_size=2**20, mlp_hidden_size=2**20, n_heads=2, n_kv_heads=2)
    stored = {"model.transformer.blocks.1.attn_norm.weight": torch.zeros(2**20, dtype=torch.int8)}
    save_file(stored, tmp_path / "model.safetensors")
    with refused("checkpoint-tensors"):
        loading.load(tmp_path, device="cpu")


GEMMA = Path(__file__).parents[1] / "conformance/data/tiny-diffusion-gemma"


def gemma(folder: Path, text: dict[str, Any], whole: dict[str, Any]) -> None:
    shutil.copytree(GEMMA, folder, dirs_exist_ok=True)
    raw = json.loads((GEMMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **whole, "text_config": {**raw["text_config"], **text}}))
    diffusion_gemma.load(folder, None, None, torch.device("cpu"))


@needs_gemma
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("final_logit_softcapping", (None, 0, -3.0, math.nan, "x", True)),
        ("sliding_window", (None, 0, -1, 2.5, 10**18)),
        ("top_k_experts", (0, 5, -1, None)),
        ("canvas_length", (None, 0, -1, 10**9, "x")),
        (
            "rope_parameters",
            (
                {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None},
                {"full_attention": {}},
                {"full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            ),
        ),
    ],
)
def test_numbers_that_transformers_takes_as_they_are(tmp_path: Path, key: str, values: tuple[Any, ...]):
    """Each was a traceback in the first step, or another network without a word."""
    for value in values:
        with refused(f"checkpoint-config-invalid: {key}") as caught:
            gemma(tmp_path, *(({}, {key: value}) if key == "canvas_length" else ({key: value}, {})))
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@needs_gemma
def test_what_a_class_of_transformers_does_not_know_is_told(tmp_path: Path):
    """It drops them, and computes something else than the checkpoint's author did."""
    with pytest.warns(NoEffectWarning, match=r"does not use: text_config.attn_logit_softcapping = 30"):
        gemma(tmp_path, {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemma(tmp_path, {}, {})
    bert = {"position_embedding_type": "absolute", "gradient_checkpointing": False, "hidden_act": "gelu"}
    assert unread(BertConfig(), bert) == {}
    assert unread(BertConfig(), bert | {"position_embedding_type": "relative_key"}) == {
        "position_embedding_type": "relative_key"
    }
    older = {"global_rope_theta": 160000.0, "global_attn_every_n_layers": 3, "norm_eps": 1e-5, "layer_norm_eps": 1e-5}
    for layers in (2, 3, 4):  # 3 is the default
        given: dict[str, Any] = older | {"global_attn_every_n_layers": layers}
        assert unread(ModernBertConfig(**given), given) == {}, "what it converts"
    assert unread(ModernBertConfig(), older | {"layer_norm_eps": 1e-6}) == {"layer_norm_eps": 1e-6}
    assert unread(Qwen2Config(), {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6}) == {}


@each("layers", [0, 1])
def test_fewer_layers_than_a_masked_lm_has(tmp_path: Path, layers: int):
    """transformers leaves out the others."""
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers}))
    with refused(f"checkpoint-tensors: bert.encoder.layer.{layers}"):
        huggingface.load(tmp_path, None, None, torch.device("cpu"))


@each(
    ("key", "value", "refusal"),
    [
        ("vocab_size", "x", "checkpoint-config-invalid: config.json, vocab_size"),  # not: a broken tokenizer
        ("vocab_size", 5, "checkpoint-tensors: word_embeddings.weight [256, 32] instead of [5, 32]"),
        ("hidden_act", "x", "checkpoint-config-invalid: KeyError"),
    ],
)
def test_a_masked_lm_of_another_shape(tmp_path: Path, key: str, value: object, refusal: str):
    folder = tiny.write("bert", tmp_path / "bert")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {key: value}))
    with refused(refusal):
        loading.load(folder, device="cpu")
