"""A tiny model of each family, in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.eval.testbeds import toys
from dllm_sampler.models.diffusion_gemma import DiffusionGemmaDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import Transformer, TransformerConfig

CAUSAL = ("causal", "fast", "context", "in_blocks", "sdar", "pooled")  # in blocks
FAMILIES = (*toys.TOYS, *CAUSAL, "moe", "bert", "gemma")
DTYPES = ("float64", "float32", "bfloat16", "float16")
GEMMA_BLOCK = 8  # canvas length of the DiffusionGemma


def denoiser(family: str, dtype: str) -> Denoiser:
    """The model of a family: those of `toys.denoiser`, or one of `_other`."""
    kind = getattr(torch, dtype)
    return (
        _other(family, kind)
        if family in ("sdar", "pooled", "moe", "bert", "gemma")
        else toys.denoiser(family, dtype=kind)
    )


@cache
def _other(family: str, dtype: torch.dtype) -> Denoiser:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if family == "sdar":
            config = replace(toys.transformer(kv_heads=2).config, qk_norm=True)
            return replace(toys.wrapped(_random(config, dtype)), attention="block_causal", block_length=4)
        if family == "pooled":  # as LLaDA2.2: the tokens of a block choose among the same experts
            config = toys.causal_transformer().config
            assert config.moe is not None
            pooled = replace(config.moe, groups=1, top_groups=1, pool=4, block=4)
            model = _random(replace(config, moe=pooled), dtype)
            return replace(toys.wrapped(model), attention="block_causal", block_length=4)
        if family == "moe":
            experts = MoeConfig(num_experts=4, top_k=2, expert_size=24, layers=frozenset({0, 1}), shared_size=16)
            return toys.wrapped(_random(replace(toys.transformer().config, qk_norm=True, moe=experts), dtype))
        return _bert(dtype) if family == "bert" else _gemma(dtype)


def _random(config: TransformerConfig, dtype: torch.dtype) -> Transformer:
    model = Transformer(config)
    model.init_weights(std=0.8, embedding_std=1.0, generator=torch.Generator().manual_seed(2))
    return model.to(dtype)


def _bert(dtype: torch.dtype) -> MaskedLMDenoiser:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=toys.VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, initializer_range=0.5, pad_token_id=toys.EOS,
    )  # fmt: skip
    model: Any = BertForMaskedLM(config).eval()
    return MaskedLMDenoiser(model.to(dtype), toys.MASK, toys.EOS, toys.EOS)


def _gemma(dtype: torch.dtype) -> DiffusionGemmaDenoiser:
    made: Any = gemma(toys.VOCAB, toys.EOS)
    if dtype == torch.float64:
        made.set_experts_implementation("batched_mm")  # the grouped product that transformers takes has no float64
    return DiffusionGemmaDenoiser(made.eval().to(dtype), toys.EOS, 0)


def gemma(vocab: int, eos: int) -> Any:
    """A DiffusionGemma of transformers, with random weights; its last tokens are those of images."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = {
        "vocab_size": vocab, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 8, "sliding_window": 8, "max_position_embeddings": 64, "initializer_range": 0.5,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": eos,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    config = DiffusionGemmaConfig(
        canvas_length=GEMMA_BLOCK, text_config=text, vision_config=vision,
        image_token_id=vocab - 2, boi_token_id=vocab - 3, eoi_token_id=vocab - 4,
    )  # fmt: skip
    return DiffusionGemmaForBlockDiffusion._from_config(config, attn_implementation="sdpa")  # pyright: ignore
