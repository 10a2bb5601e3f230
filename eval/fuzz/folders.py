"""Tiny checkpoints of every family and of transformers' models, in folders: what damaged configs are made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dllm_sampler.eval.fuzz import models
from dllm_sampler.eval.testbeds.checkpoint import WORDS
from dllm_sampler.models.families import FAMILIES, to_checkpoint
from dllm_sampler.models.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "mask_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 10000.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {  # by family
    "LLaDA": {
        "model_type": "llada", "vocab_size": len(WORDS), "embedding_size": len(WORDS), "d_model": 16, "n_layers": 2,
        "n_heads": 2, "n_kv_heads": 1, "mlp_hidden_size": 24, "max_sequence_length": 64, "mask_token_id": 2,
        "eos_token_id": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "weight_tying": False,
    },
    "iLLaDA": {"model_type": "illada", "mlp_bias": False, "layer_norm_eps": None, "tie_word_embeddings": True},
    "Dream": {"model_type": "Dream", "use_sliding_window": False, "max_window_layers": 28, "rope_scaling": None},
    "SDAR": {"model_type": "sdar", "head_dim": 8, "block_size": 4, "attention_bias": False},
    "SDAR-MoE": {
        "model_type": "sdar_moe", "head_dim": 8, "block_size": 4, "moe_intermediate_size": 12, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], **EXPERTS,
    },
    "LLaDA-MoE": {
        "model_type": "lladamoe", "expert_intermediate_size": 12, "dense_intermediate_size": 24, "qk_layernorm": True,
        "moe_layer_freq": [0, 1], "partial_rotary_factor": 1, "intermediate_size": None, **EXPERTS,
    },
    "LLaDA2": {
        "model_type": "llada2_moe", "head_dim": 8, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "num_shared_experts": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True,
        "routed_scaling_factor": 2.5, "block_size": 8, "expert_capacity": 3, "use_bias": False, **EXPERTS,
    },
    "Stable-DiffCoder": {
        "model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"], "head_dim": 8, "mlp_bias": False,
    },
    "Fast-dLLM v2": {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, "use_sliding_window": False},
    "Nemotron-Labs-Diffusion": {
        "model_type": "nemotron_labs_diffusion", "head_dim": 8, "block_size": 8, "rope_parameters": YARN,
        "rope_theta": None,
    },
}  # fmt: skip
BERT, GEMMA, TARGET = "BERT", "DiffusionGemma", "target"


def write(folder: Path, tokenizer: Path) -> list[str]:
    """Write a checkpoint of each kind into a folder of its name, with the tokenizer of another one.

    Returns:
        The names: those of `CONFIGS`, `BERT` and `GEMMA` (of transformers) and `TARGET` (an autoregressive one).
    """
    for name, own in CONFIGS.items():
        (folder / name).mkdir()
        raw = own if name == "LLaDA" else {**SIZES, **own}
        family = next(one for one in FAMILIES if one.name == name)
        model = Transformer(family.config(raw))
        model.init_weights(std=0.3, embedding_std=1.0, generator=torch.Generator().manual_seed(0))
        save_file(to_checkpoint(model, family), folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(raw))
    for name, model in (_bert(), _gemma(), _target()):
        model.save_pretrained(folder / name)
    names = [*CONFIGS, BERT, GEMMA, TARGET]
    for name in names:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / file, folder / name / file)
    return names


def _bert() -> tuple[str, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    config.update({"mask_token_id": 2, "eos_token_id": 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BERT, BertForMaskedLM(config)


def _gemma() -> tuple[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GEMMA, models.gemma(len(WORDS), 1)


def _target() -> tuple[str, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TARGET, Qwen2ForCausalLM(config)
