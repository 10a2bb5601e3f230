"""A forward whose layers run on Triton kernels in place of their own modules: the same sums, fewer passes over memory.

Kernels of a layer: norm, one projection of queries, keys and values, their rotation with the writing of the slots,
attention over the slots, the sum and norm before the feed-forward, the gated product. A cache that runs the layers
itself, on a padded plan, uses the modules.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm_sampler.core.packing import Pack
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.kernels.backend import DTYPES, LayerKernels, has_hooks, warn
from dllm_sampler.models.moe import feed
from dllm_sampler.models.quantized import int8_parts
from dllm_sampler.models.transformer import Drive, Layer, RMSNorm, Rope, SwiGLU, Transformer, pick_rows


def drive(
    kernels: LayerKernels | None,
    model: Transformer,
    canvas: Canvas,
    query: Query,
    plan: Plan,
    together: Tensor | None = None,
) -> Drive | None:
    """Return a `Drive` that runs the layers on kernels, or None if their modules must run.

    Args:
        together: see `Layer.mlp`.
    """
    cache = plan.cache
    if kernels is None or plan.pack is None:
        return None
    dtype, device = model.embed.weight.dtype, canvas.ids.device.type
    stored = cache.slots is None or cache.slots.keys[0].dtype == dtype
    yarn = model.config.yarn
    unknown = "shadow rows" if query.leave_one_out else "queries that are scaled by position"
    if query.leave_one_out or (yarn is not None and yarn.queries > 0):
        warn(f"Triton's attention does not support {unknown}. The layers of such a forward run in torch.")
        return None
    if (
        dtype not in DTYPES
        or not stored
        or torch.is_autocast_enabled(device)
        or not all(map(is_unmodified, model.layers))
    ):
        return None
    return Fused(kernels, plan, plan.pack, together)


def is_unmodified(layer: nn.Module) -> bool:
    """Return True if the layer, its attention and its norms are not hooked, wrapped or replaced."""
    if type(layer) is not Layer or has_hooks(layer):  # between two layers a part of the stream is not added yet
        return False
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    norms = [norm for norm in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if norm is not None]
    ours = all(type(one) is nn.Linear for one in linears) and all(type(one) is RMSNorm for one in norms)
    return ours and not any(has_hooks(one) for one in (*linears, *norms))


@dataclass
class Fused:
    """A `Drive` that runs a layer of a pack on kernels, in place of `Cache.layer`. It is made once per forward.

    Args:
        kernels: the kernels of a layer.
        plan: the plan of the forward. Its cache stores keys and values.
        pack: the entries.
        together: see `Layer.mlp`.
    """

    kernels: LayerKernels
    plan: Plan
    pack: Pack
    together: Tensor | None = None
    feed: Tensor | None = None  # `[1, T, D]` feed-forward of the layer before, which the next norm adds to the stream

    @cached_property
    def places(self) -> Tensor:
        """`[T]` slots that keys and values are written to, from 0 to B * (L+1) - 1. -1 for entries without a slot."""
        slots = self.plan.cache.slots
        assert slots is not None
        empty = self.pack.slots % slots.columns == slots.columns - 1
        return self.pack.slots.masked_fill(empty, -1)

    def __call__(self, index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None) -> Tensor:
        """Run a layer as a `Drive` does. The result lacks `feed`, which the next layer adds. The last layer adds it."""
        kernels = self.kernels
        normed, hidden = kernels.norm(hidden, layer.attn_norm.weight, layer.attn_norm.eps, self.feed)
        heads = self._attend(index, layer, normed, rope).flatten(1)[None]  # [1, T, H Dh]
        early, late = (rows, None) if self.together is None else (None, rows)  # see `Layer.forward`
        delta = projected(pick_rows(heads, early), layer.o_proj, kernels=kernels)
        normed, hidden = kernels.norm(pick_rows(hidden, early), layer.mlp_norm.weight, layer.mlp_norm.eps, delta)
        self.feed = self._feed(layer.ffn, normed)
        return hidden if rows is None else pick_rows(hidden + self.feed, late)

    def _attend(self, index: int, layer: Layer, normed: Tensor, rope: Rope) -> Tensor:
        """Return attention `[T, H, Dh]` before the output projection, and write the slots of this layer."""
        pack, kept = self.pack, self.plan.cache.slots
        slots = None if kept is None else (kept.keys[index], kept.values[index])
        q, k, v = self.kernels.qkv_rope(
            projected(normed, layer.q_proj, layer.k_proj, layer.v_proj, kernels=self.kernels)[0],
            rope.cos,
            rope.sin,
            layer.q_proj.out_features // layer.head_dim,
            layer.k_proj.out_features // layer.head_dim,
            q_weight=None if layer.q_norm is None else layer.q_norm.weight,
            k_weight=None if layer.k_norm is None else layer.k_norm.weight,
            eps=0.0 if layer.q_norm is None else layer.q_norm.eps,
            slots=slots,
            places=None if slots is None else self.places,
            fresh=slots is None or pack.segment is not None,  # else they are read where they are stored
        )
        if self.plan.pairs is not None and k is not None and v is not None:
            self.plan.pairs.append((k, v))
        return self.kernels.attention(
            q,
            k,
            v,
            slots,
            pack.bounds,
            pack.column,
            end=pack.end,
            until=pack.until,
            segment=pack.segment,
            unread=pack.unread,
            longest=pack.sizes.longest,
        )

    def _feed(self, ffn: nn.Module, normed: Tensor) -> Tensor:
        """Return the feed-forward `[N, M, D]` of the normed stream. Mixtures of experts run their own module."""
        if type(ffn) is not SwiGLU or any(has_hooks(one) for one in ffn.modules()):
            return feed(ffn, normed, self.together)
        if any(type(one) is not nn.Linear for one in ffn.children()):
            return ffn(normed)
        gates = ffn.gate_proj, ffn.up_proj
        both = _product(normed, gates, self.kernels)
        apart = (both,) if both is not None else (projected(normed, one, kernels=self.kernels) for one in gates)
        inner = self.kernels.swiglu(*apart)
        return projected(inner, ffn.down_proj, kernels=self.kernels)


def projected(hidden: Tensor, *linears: nn.Linear, kernels: LayerKernels | None = None) -> Tensor:
    """Return several projections of `hidden [N, M, D]` side by side, from one product if the weights are adjacent.

    Args:
        kernels: kernels for int8 weights. Without kernels each int8 projection runs its own module.
    """
    found = _product(hidden, linears, kernels)
    if found is not None:
        return found
    if len(linears) == 1:
        return linears[0](hidden)
    return torch.cat([projected(hidden, linear, kernels=kernels) for linear in linears], -1)


def _product(hidden: Tensor, linears: tuple[nn.Linear, ...], kernels: LayerKernels | None) -> Tensor | None:
    """Return all projections of `projected` from one product, or None if that is not possible."""
    if len(linears) == 1 and type(linears[0].weight.data) is Tensor:  # most are, and this is the fastest check
        return F.linear(hidden, linears[0].weight, linears[0].bias)
    weight = _together([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = adjacent(*biases) if biases else None
    if weight is None or (biases and bias is None):
        return None
    if isinstance(weight, Tensor):
        return F.linear(hidden, weight, bias)
    return None if kernels is None else kernels.linear(hidden, *weight, bias)


def _together(weights: list[Tensor]) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return weights `[N_i, K]` as one tensor, or as int8 numbers and scales `[N]`. None if they are not adjacent."""
    found = [int8_parts(weight) for weight in weights]
    if any(one is None for one in found):
        return adjacent(*weights)
    numbers, scales = zip(*(one for one in found if one is not None), strict=True)
    all_numbers, all_scales = adjacent(*numbers), adjacent(*scales)
    return None if all_numbers is None or all_scales is None else (all_numbers, all_scales.flatten())


def adjacent(*parts: Tensor) -> Tensor | None:
    """Return `parts [n_i, ...]` as one tensor `[sum n_i, ...]` without a copy, or None if they are not adjacent."""
    if any(type(part.data) is not Tensor for part in parts):  # sharded or quantised: its memory is in other tensors
        return None
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        together = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not together or part.data_ptr() != at or not part.is_contiguous():
            return None
        at += part.numel() * part.element_size()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


@torch.no_grad()
def join(model: Transformer) -> None:
    """Move weights that are multiplied together next to each other, layer by layer. The parameters stay the same.

    Only for models that we loaded, since it gives the parameters new memory. A product then takes each group at once
    (`adjacent`), until something moves the weights apart again, for example `.to`.
    """
    for layer in model.layers:
        assert isinstance(layer, Layer)
        groups = [[layer.q_proj, layer.k_proj, layer.v_proj]] if is_unmodified(layer) else []
        if type(layer.ffn) is SwiGLU:
            groups.append([layer.ffn.gate_proj, layer.ffn.up_proj])
        for linears in groups:
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in linears]
                whole = parts[0] is None or type(parts[0].data) is not Tensor  # quantised ones are adjacent already
                if whole or adjacent(*(part.data for part in parts)) is not None:
                    continue
                together = torch.cat([part.data for part in parts])
                for part, view in zip(parts, together.split([len(part) for part in parts]), strict=True):
                    part.data = view
