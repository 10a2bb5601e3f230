"""Checkpoint families, and the conversion of a network to a checkpoint of one.

A family is one row of `FAMILIES`: the fields of its `config.json`, the values that are implemented, and the names of
its tensors. To add a family, add a row.
"""

from functools import partial
from typing import Any

from torch import Tensor

from dllm_sampler.errors import UserError
from dllm_sampler.models import adapted, names
from dllm_sampler.models.family import Family, assembled
from dllm_sampler.models.fields import Fields, config_error, shown
from dllm_sampler.models.nemotron import NEMOTRON
from dllm_sampler.models.reading import QWEN_IGNORED, experts, own_head_dim, read_qwen, rotary, whole_rope
from dllm_sampler.models.transformer import Transformer, TransformerConfig


def _read_llada(fields: Fields) -> TransformerConfig:
    width, heads = fields.size("d_model"), fields.size("n_heads")
    fields.size("vocab_size", default=1)  # checked also if embedding_size, which is padded, decides
    everyone = 1 if fields.flag("multi_query_attention", False) else heads  # the older way to ask for one key head
    return TransformerConfig(
        vocab_size=fields.size("embedding_size", "vocab_size"),
        hidden_size=width,
        intermediate_size=fields.size("mlp_hidden_size", default=fields.size("mlp_ratio", default=4) * width),
        num_layers=fields.depth("n_layers"),
        num_heads=heads,
        num_kv_heads=fields.size("n_kv_heads", default=everyone),
        head_dim=fields.head_dim("d_model", "n_heads"),
        rope_theta=whole_rope(fields),
        norm_eps=fields.eps(1e-5),
        max_positions=fields.length("max_sequence_length", default=1024),
        qkv_bias=fields.flag("include_qkv_bias", False),
        tie_embeddings=fields.flag("weight_tying", True),
    )


def _read_illada(fields: Fields) -> TransformerConfig:
    bias = fields.flag("attention_bias", False)
    tied = fields.flag("tie_word_embeddings", True)
    return read_qwen(fields, qkv_bias=bias, o_bias=bias, tie_embeddings=tied)


def _read_llada_moe(fields: Fields) -> TransformerConfig:
    layers, head_dim = fields.depth("num_hidden_layers"), own_head_dim(fields)
    theta, rotary_dim = rotary(fields, head_dim, 1.0)
    frequency = fields.get("moe_layer_freq", [1] * layers)
    if not isinstance(frequency, list) or len(frequency) != layers or not all(one in (0, 1) for one in frequency):
        reason = f"moe_layer_freq must list 0 or 1 for each of {layers} layers, not {shown(frequency)}"
        raise config_error(fields.source, reason)
    expert = fields.size("expert_intermediate_size")
    return read_qwen(
        fields,
        head_dim=head_dim,
        rope_theta=theta,
        rotary_dim=rotary_dim,
        intermediate_size=fields.size("dense_intermediate_size", default=expert),
        norm_eps=fields.eps(1e-5),
        max_positions=fields.length("max_position_embeddings", default=4096),
        qkv_bias=fields.flag("attention_bias", False),
        o_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("qk_layernorm", False),
        moe=experts(
            fields,
            expert_size=expert,
            layers=frozenset(i for i, one in enumerate(frequency) if one),
            shared_size=fields.count("shared_expert_intermediate_size"),
            weigh_bias=True,
        ),
    )


def _read_llada2(fields: Fields) -> TransformerConfig:
    layers, head_dim = fields.depth("num_hidden_layers"), own_head_dim(fields)
    theta, rotary_dim = rotary(fields, head_dim, 0.5)
    if fields.length("rotary_dim", default=rotary_dim or head_dim) != (rotary_dim or head_dim):
        reason = f"rotary_dim is {fields.get('rotary_dim')}, but partial_rotary_factor gives {rotary_dim or head_dim}"
        raise config_error(fields.source, reason)
    groups, top_groups = fields.size("n_group", default=1), fields.size("topk_group", default=1)
    pool = 0 if fields.get("expert_capacity") is None else fields.size("expert_capacity")  # of LLaDA2.2: no groups then
    dense, expert = fields.count("first_k_dense_replace"), fields.size("moe_intermediate_size")
    return read_qwen(
        fields,
        head_dim=head_dim,
        rope_theta=theta,
        rotary_dim=rotary_dim,
        intermediate_size=fields.size("intermediate_size", default=expert),
        qkv_bias=fields.flag("use_qkv_bias", False),
        o_bias=fields.flag("use_bias", True),
        qk_norm=fields.flag("use_qk_norm", True),
        moe=experts(
            fields,
            expert_size=expert,
            layers=frozenset(range(dense, layers)),
            shared_size=fields.size("moe_shared_expert_intermediate_size", default=expert)
            * fields.count("num_shared_experts"),
            score="sigmoid",
            groups=1 if pool else groups,
            top_groups=1 if pool else top_groups,
            pool=pool,
            block=fields.length("block_size", default=32) if pool else 0,
            normalise=True,
            scale=fields.number("routed_scaling_factor", 1.0, most=1e4),
            bias=True,
        ),
    )


LLADA = Family(
    name="LLaDA",
    model_type="llada",
    read=_read_llada,
    supported={
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "activation_type": "silu",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
    },
    ignored=(
        *("alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention", "rope_full_precision", "precision"),
        *("train_max_sequence_length", "tie_word_embeddings", "effective_n_kv_heads"),
        # transformers' names for the same numbers. Published code does not read them.
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        "max_position_embeddings",
    ),
    names=names.LLADA,
    end_of_turn="<|eot_id|>",
)

ILLADA = Family(  # arXiv 2606.25331: Llama's format, not LLaDA's
    name="iLLaDA",
    model_type="illada",
    read=_read_illada,
    supported={"hidden_act": "silu", "mlp_bias": False, "layer_norm_eps": None},  # a number there means LayerNorm
    names=names.QWEN,
    mask_token="<[MASK]>",
)

DREAM = Family(
    name="Dream",
    model_type="dream",
    read=partial(read_qwen, qkv_bias=True),
    supported={"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False},
    ignored=(*QWEN_IGNORED, "attention_bias"),  # its attention has biases whatever that says
    names=names.QWEN,
    shift=True,
    end_of_turn="<|im_end|>",
)

LLADA_MOE = Family(
    name="LLaDA-MoE",
    model_type="llada",
    marker="expert_intermediate_size",
    read=_read_llada_moe,
    supported={
        "hidden_act": "silu",
        "clip_qkv": None,
        "moe_router_score_function": "softmax",
        "router_num_group": None,
        "router_topk_group": None,
        "routed_scaling_factor": 1,
        "norm_topk_prob": False,
    },
    names=names.LLADA_MOE,
    end_of_turn="<|role_end|>",
    mask_token="<|mask|>",
)

LLADA2 = Family(
    name="LLaDA2",
    model_type="llada2_moe",
    read=_read_llada2,
    supported={
        "hidden_act": "silu",
        "use_sliding_window": False,
        "norm_head": False,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_rmsnorm": True,
        "router_dtype": "fp32",
    },
    ignored=(*QWEN_IGNORED, "num_nextn_predict_layers", "mtp_loss_scaling_factor"),
    names=names.LLADA2,
    attention="block_causal",
    # LLaDA2.0 and 2.1 do not say; the model card and the papers (arXiv 2512.15745) do.
    block_length=lambda fields: fields.length("block_size", default=32),
    end_of_turn="<|role_end|>",
    mask_token="<|mask|>",
)

# A family with a marker comes before the one without.
FAMILIES = (
    *(LLADA_MOE, LLADA, ILLADA, DREAM, adapted.SDAR, LLADA2, adapted.SDAR_MOE, adapted.STABLE_DIFFCODER),
    *(adapted.FAST_DLLM, NEMOTRON, adapted.A2D_QWEN3, adapted.A2D_QWEN2, adapted.A2D_LLAMA, adapted.RND1),
)
ALIASES = {"lladamoe": "llada"}  # `model_type` under other names


def to_checkpoint(model: Transformer, family: Family = LLADA) -> dict[str, Tensor]:
    """Return the model's tensors under the family's names, contiguous for `safetensors`. A tied head is left out."""
    own = model.state_dict()
    names = [name for name in own if not (model.config.tie_embeddings and name == "lm_head.weight")]
    held = family.held(names, model.config)
    return {name: assembled(own, parts).contiguous() for name, parts in held.items()}


def llada_config(
    config: TransformerConfig, *, mask_token_id: int, eos_token_id: int, pad_token_id: int
) -> dict[str, Any]:
    """Return the `config.json` of a LLaDA checkpoint with this shape.

    Raises:
        UserError: LLaDA's format has no field for a part of the shape.
    """
    parts = [name for name in ("qk_norm", "o_bias", "rotary_dim", "yarn", "moe") if getattr(config, name)]
    parts += ["head_dim"] * (config.head_dim * config.num_heads != config.hidden_size)
    if parts:
        raise UserError(
            "export-unsupported", f"LLaDA's format has no field for {', '.join(parts)}. Build the network without."
        )
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": LLADA.model_type,
        **LLADA.supported,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "d_model": config.hidden_size,
        "mlp_hidden_size": config.intermediate_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "max_sequence_length": config.max_positions,
        "include_qkv_bias": config.qkv_bias,
        "weight_tying": config.tie_embeddings,
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
