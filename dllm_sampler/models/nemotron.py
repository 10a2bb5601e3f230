"""Nemotron-Labs-Diffusion: Ministral's format with YaRN, decoded in blocks against a causal context."""

from dllm_sampler.models import names
from dllm_sampler.models.family import Family
from dllm_sampler.models.fields import BOTH, Fields, config_error, neutral, shown, unsupported_error
from dllm_sampler.models.reading import own_head_dim, read_qwen
from dllm_sampler.models.transformer import TransformerConfig
from dllm_sampler.models.yarn import Yarn

YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "llama_4_scaling_beta")
EVEN = ("mscale", "mscale_all_dim")  # attention is scaled by the ratio of the two, which must be 1
ROPE = ("rope_type", "type", "rope_theta", *YARN, *EVEN)


def _read(fields: Fields) -> TransformerConfig:
    bias = fields.flag("attention_bias", False)
    theta, yarn = _positions(fields)
    return read_qwen(fields, head_dim=own_head_dim(fields), rope_theta=theta, yarn=yarn, qkv_bias=bias, o_bias=bias)


def _positions(fields: Fields) -> tuple[float, Yarn | None]:
    """Return the base and the YaRN settings of rotary positions, from `rope_parameters` or `rope_scaling`."""
    said = [name for name in BOTH if fields.get(name) is not None]
    inside = fields.get(said[0], {}) if said else {}
    where = said[0] if said else BOTH[0]
    if len(said) > 1:
        raise unsupported_error(fields.source, f"{said[1]} next to {said[0]}")
    if not isinstance(inside, dict):
        raise config_error(fields.source, f"{where} must be an object, not {shown(inside)}")
    kind = inside.get("rope_type", inside.get("type"))
    if kind != "yarn":
        return fields.rope(10_000.0)[0], None
    for key, value in inside.items():
        if key not in ROPE and not neutral(key, value):
            raise unsupported_error(fields.source, f"{where} with {key} = {shown(value)}")
    if inside.get(EVEN[0]) != inside.get(EVEN[1]) or not inside.get(EVEN[0]):
        raise unsupported_error(fields.source, f"{where} without equal mscale and mscale_all_dim")
    numbers = Fields({key: value for key, value in inside.items() if value is not None}, f"{fields.source}: {where}")
    theta = numbers.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if fields.get("rope_theta") not in (None, theta):
        said = f"rope_theta = {fields.get('rope_theta'):g} and {where}.rope_theta = {theta:g}"
        raise config_error(fields.source, f"{said} contradict each other")
    queries = inside.get("llama_4_scaling_beta")
    yarn = Yarn(
        factor=numbers.number("factor", 1.0, most=1e6),
        original=numbers.length("original_max_position_embeddings", default=16_384),
        fast=numbers.number("beta_fast", 32.0, most=1e6),
        slow=numbers.number("beta_slow", 1.0, most=1e6),
        queries=0.0 if queries in (None, 0) else numbers.number("llama_4_scaling_beta", 0.1, most=1e3),
    )
    return numbers.checked_base(theta), yarn


NEMOTRON = Family(
    name="Nemotron-Labs-Diffusion",
    model_type="nemotron_labs_diffusion",
    read=_read,
    supported={"hidden_act": "silu", "mlp_bias": False, "dlm_paradigm": "bidirectional"},
    ignored=("dp_varying_mask_ratio",),  # of its training
    names=names.NEMOTRON,
    seeds=True,
    attention="causal_context",
    block_length=lambda fields: fields.length("block_size", default=32),
)
