"""Reading `config.json`: the fields that several families have in common."""

from typing import Any

from dllm_sampler.errors import counted
from dllm_sampler.models.fields import Fields, config_error, unsupported_error
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import TransformerConfig

QWEN_IGNORED = ("sliding_window", "max_window_layers")  # of no effect without use_sliding_window


def read_qwen(fields: Fields, **changes: Any) -> TransformerConfig:
    """Return the shape of a network whose `config.json` follows Qwen's, with `changes` to it."""
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    read = {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": width,
        "num_layers": fields.depth("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.size("num_key_value_heads", default=heads),
        "norm_eps": fields.eps(1e-6),
        "max_positions": fields.length("max_position_embeddings", default=32_768),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }
    if "rope_theta" not in changes:
        changes["rope_theta"] = whole_rope(fields)
    if "head_dim" not in changes:
        changes["head_dim"] = fields.head_dim("hidden_size", "num_attention_heads")
    if "intermediate_size" not in changes:
        changes["intermediate_size"] = fields.size("intermediate_size")
    return TransformerConfig(**{**read, **changes})


def experts(fields: Fields, **settings: Any) -> MoeConfig:
    """Return the shape of the expert layers, from fields that families share and from `settings`."""
    bias = fields.flag("moe_router_enable_expert_bias", False)
    moe = MoeConfig(
        **{"num_experts": fields.size("num_experts"), "top_k": fields.size("num_experts_per_tok"), "bias": bias}
        | settings
    )
    if moe.num_experts % moe.groups:
        reason = f"num_experts={moe.num_experts} is not a multiple of n_group={moe.groups}"
        raise config_error(fields.source, reason)
    if moe.top_groups > moe.groups:
        raise config_error(fields.source, f"topk_group={moe.top_groups} exceeds n_group={moe.groups}")
    available = moe.num_experts // moe.groups * moe.top_groups
    if moe.top_k > available:
        reason = f"num_experts_per_tok is {moe.top_k}, but a token can choose from {counted(available, 'expert')}"
        raise config_error(fields.source, reason)
    if moe.pool and not moe.top_k <= moe.pool <= moe.num_experts:
        span = f"from num_experts_per_tok={moe.top_k} to num_experts={moe.num_experts}"
        raise config_error(fields.source, f"expert_capacity must be {span}, not {moe.pool}")
    return moe


def own_head_dim(fields: Fields) -> int:
    """Return `head_dim`, the width of a head. By default it is the hidden size divided by the number of heads."""
    if fields.get("head_dim") is None:
        return fields.head_dim("hidden_size", "num_attention_heads")
    size = fields.size("head_dim")
    if size % 2:
        raise config_error(fields.source, f"head_dim must be even, not {size}")
    return size


def rotary(fields: Fields, head_dim: int, default: float) -> tuple[float, int | None]:
    """Return the base of rotary positions, and the number of a head's dimensions that rotate, or None for all."""
    theta, part = fields.rope(partial=default)
    size = int(head_dim * part) if part <= 1 else 0
    if size % 2 or not size:
        reason = f"partial_rotary_factor = {part:g} of head_dim = {head_dim} is not an even number from 2 to {head_dim}"
        raise config_error(fields.source, reason)
    return theta, None if size == head_dim else size


def whole_rope(fields: Fields) -> float:
    """Return the base of rotary positions, and refuse those that rotate only a part of a head."""
    theta, part = fields.rope()
    if part != 1:
        raise unsupported_error(fields.source, f"partial_rotary_factor = {part:g}")
    return theta
