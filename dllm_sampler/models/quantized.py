"""Weights of layers as 8-bit integers (torchao), one scale per output: half the bytes of bfloat16 to store and read."""

from typing import Any

import torch
from torch import Tensor, nn

from dllm_sampler.errors import UserError, installing
from dllm_sampler.models.transformer import Layer, SwiGLU, Transformer, TransformerConfig


def check(config: TransformerConfig) -> None:
    """Refuse a model that cannot be quantised, before its weights are read.

    Raises:
        UserError: torchao is missing, or the model has experts.
    """
    if config.moe is not None:
        raise UserError(
            "option-not-applicable",
            "model.quantize=int8 does not support mixture-of-experts models. Remove model.quantize.",
        )
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        raise UserError(
            "package-missing", f"model.quantize=int8 needs the package torchao. Run {installing('quantize')}."
        ) from None


@torch.no_grad()
def quantize(model: Transformer, device: torch.device) -> None:
    """Move a model to `device`, layer by layer, with the linear weights of its layers as int8. Embedding and head stay.

    Each number becomes the nearest of 255 multiples of a scale. A row of the weight has one scale. Activations keep
    their dtype, and the model cannot be trained. Weights that are multiplied together become adjacent in memory
    (`fused.adjacent`).
    """
    check(model.config)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    rule = Int8WeightOnlyConfig(set_inductor_config=False, version=2)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        quantize_(layer.to(device), rule)
        together = [[layer.q_proj, layer.k_proj, layer.v_proj]]
        if type(layer.ffn) is SwiGLU:
            together.append([layer.ffn.gate_proj, layer.ffn.up_proj])
        for linears in together:
            _join(linears)
    model.to(device).requires_grad_(False)


def _join(linears: list[nn.Linear]) -> None:
    """Move the integers, the scales and the biases of quantised layers to new, adjacent memory."""
    names, about = linears[0].weight.__tensor_flatten__()  # pyright: ignore - torchao's
    parts = {name: [getattr(linear.weight, name) for linear in linears] for name in names}
    sizes = [len(linear.weight) for linear in linears]
    views = {name: torch.cat(part).split(sizes) for name, part in parts.items()}
    for i, linear in enumerate(linears):
        weight, inner = linear.weight.data, {name: view[i] for name, view in views.items()}
        kind: Any = type(weight)
        joined = kind.__tensor_unflatten__(inner, about, weight.size(), weight.stride())
        linear.weight = nn.Parameter(joined, requires_grad=False)
    if linears[0].bias is not None:
        biases = torch.cat([linear.bias.data for linear in linears]).split(sizes)
        for linear, bias in zip(linears, biases, strict=True):
            linear.bias.data = bias


def int8_parts(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the `[N, K] int8` and `[N, 1]` scales of a weight that `quantize` made, or None for another weight."""
    data = weight.data
    scales_activations = (getattr(data, name, "") is not None for name in ("act_quant_kwargs", "act_pre_scale"))
    if type(data) is Tensor or any(scales_activations):
        return None
    numbers, scale = getattr(data, "qdata", None), getattr(data, "scale", None)
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int8 or not isinstance(scale, Tensor):
        return None
    return (numbers, scale) if scale.shape == (len(numbers), 1) and scale.dtype == torch.float32 else None
