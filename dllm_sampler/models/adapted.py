"""Families that were autoregressive models before: each is a row of `families.FAMILIES`."""

from dataclasses import replace
from functools import partial

from dllm_sampler.models import names
from dllm_sampler.models.family import Family
from dllm_sampler.models.fields import Fields, config_error, shown
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.reading import QWEN_IGNORED, experts, own_head_dim, read_qwen
from dllm_sampler.models.transformer import TransformerConfig


def _read_sdar(fields: Fields, moe: MoeConfig | None = None) -> TransformerConfig:
    bias = fields.flag("attention_bias", False)
    return read_qwen(fields, head_dim=own_head_dim(fields), qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)


def _read_sdar_moe(fields: Fields, normalise: bool = False) -> TransformerConfig:
    layers, stride = fields.depth("num_hidden_layers"), fields.length("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(one) is int and 0 <= one < layers for one in dense):
        raise config_error(
            fields.source, f"mlp_only_layers must list layers from 0 to {layers - 1}, not {shown(dense)}"
        )
    moe = experts(
        fields,
        expert_size=fields.size("moe_intermediate_size"),
        layers=frozenset(one for one in range(layers) if one not in dense and (one + 1) % stride == 0),
        normalise=fields.flag("norm_topk_prob", normalise),
    )
    return _read_sdar(fields, moe)


def _read_llama(fields: Fields) -> TransformerConfig:
    bias = fields.flag("attention_bias", False)
    return read_qwen(fields, head_dim=own_head_dim(fields), qkv_bias=bias, o_bias=bias)


def _read_qwen2(fields: Fields) -> TransformerConfig:
    return read_qwen(fields, head_dim=own_head_dim(fields), qkv_bias=True)


SDAR = Family(  # also TraDo, arXiv 2509.06949
    name="SDAR",
    model_type="sdar",
    read=_read_sdar,
    supported={"hidden_act": "silu", "use_sliding_window": False},
    ignored=(*QWEN_IGNORED, "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"),
    names=names.SDAR,
    attention="block_causal",
    block_length=lambda fields: fields.length("block_size", default=4),
    end_of_turn="<|im_end|>",
    mask_token="<|MASK|>",
)

SDAR_MOE = replace(  # SDAR's attention, the experts of Qwen3-MoE
    SDAR,
    name="SDAR-MoE",
    model_type="sdar_moe",
    read=_read_sdar_moe,
    supported={**SDAR.supported, "moe_router_enable_expert_bias": False},
    names=names.SDAR_MOE,
)

STABLE_DIFFCODER = Family(  # arXiv 2601.15892
    name="Stable-DiffCoder",
    model_type="llama",
    architecture="StableDiffcoderForCausalLM",
    read=_read_llama,
    supported={"hidden_act": "silu", "mlp_bias": False},
    names=names.QWEN,
    attention="block_causal",
    block_length=lambda fields: 4,  # no field says it: the paper and the default of the published loop do
    mask_token="<[MASK_TOKEN]>",
)

FAST_DLLM = Family(  # Fast-dLLM v2, arXiv 2509.26328, from Qwen2.5
    name="Fast-dLLM v2",
    model_type="fast_dllm_qwen",
    read=_read_qwen2,
    supported={"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False},
    ignored=QWEN_IGNORED,
    names=names.QWEN,
    shift=True,
    attention="block_causal",
    block_length=lambda fields: fields.length("bd_size", default=32),
    end_of_turn="<|im_end|>",
    mask_token="|<MASK>|",
)

# Tiny-A2D: Qwen3, Qwen2 and Llama as the `dllm` library adapts them. Layers with a window see as much as the others. No
# field tells checkpoints trained on whole rows (mdlm) from those trained in blocks (bd3lm).
_A2D_IGNORED = (*QWEN_IGNORED, "use_sliding_window", "layer_types")

A2D_QWEN3 = Family(
    name="A2D-Qwen3",
    model_type="a2d-qwen3",
    read=_read_sdar,
    supported={"hidden_act": "silu"},
    ignored=_A2D_IGNORED,
    names=names.SDAR,
    may_see_blocks=True,
    end_of_turn="<|im_end|>",
    mask_token="<|mask|>",
)

A2D_QWEN2 = replace(A2D_QWEN3, name="A2D-Qwen2", model_type="a2d-qwen2", read=_read_qwen2, names=names.QWEN)

A2D_LLAMA = Family(
    name="A2D-Llama",
    model_type="a2d-llama",
    read=_read_llama,
    supported={"hidden_act": "silu", "mlp_bias": False},
    names=names.QWEN,
    may_see_blocks=True,
    end_of_turn="<|eot_id|>",
    mask_token="<|mask|>",
)

RND1 = Family(  # Qwen3-MoE that sees the whole row
    name="RND1",
    model_type="rnd1",
    read=partial(_read_sdar_moe, normalise=True),  # its config class sets norm_topk_prob, whatever the file says
    supported={"hidden_act": "silu", "use_sliding_window": False},
    ignored=(*QWEN_IGNORED, "is_causal", "moe_backend", "num_diffusion_steps"),
    names=names.SDAR_MOE,
    shift=True,
    end_of_turn="<|im_end|>",
)
