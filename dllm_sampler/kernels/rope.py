"""From the fused projection to rotated heads in one launch: split, norms, rotary positions and slots."""

# Pyright knows neither names that a compile-time branch binds nor constants as constexpr.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.sizes import cdiv, next_power_of_2

WARPS = 4
_BYTES = 4096  # of the heads that a program holds at once


@triton.jit
def _scaled(x, inverse, weight, inside):
    scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32) * scale).to(x.dtype)


@triton.jit
def _put(out, slots, own, slot, at, x, inside):
    if out is not None:
        tl.store(out + own + at, x, mask=inside)
    if slots is not None:  # noqa: SIM102 (this one is known when compiling)
        if slot >= 0:
            tl.store(slots + slot + at, x, mask=inside)


@triton.jit
def _heads(
    fused, weight, cos, sin, out, slots, row, slot, first, count, eps,
    TURN: tl.constexpr, DH: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate BLOCK_H heads of queries, keys or values, from head `first` on.

    The two halves of the first ROTARY dimensions rotate together. The tail of a head does not rotate.
    """
    head = first + tl.arange(0, BLOCK_H)[:, None]
    half: tl.constexpr = ROTARY // 2
    d = tl.arange(0, HALF)[None]
    inside = (head < count) & (d < half)
    at = head * DH + d
    x = tl.load(fused + at, mask=inside, other=0.0)
    y = tl.load(fused + at + half, mask=inside, other=0.0)
    if TAIL:
        d_tail = ROTARY + tl.arange(0, TAIL)[None]
        inside_tail = (head < count) & (d_tail < DH)
        at_tail = head * DH + d_tail
        z = tl.load(fused + at_tail, mask=inside_tail, other=0.0)
    if weight is not None:
        squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) + tl.sum(y.to(tl.float32) * y.to(tl.float32), 1)
        if TAIL:
            squares += tl.sum(z.to(tl.float32) * z.to(tl.float32), 1)
        inverse = (1.0 / tl.sqrt_rn(squares / DH + eps))[:, None]
        x = _scaled(x, inverse, weight + d, d < half)
        y = _scaled(y, inverse, weight + half + d, d < half)
        if TAIL:
            z = _scaled(z, inverse, weight + d_tail, d_tail < DH)
    own = row * count * DH
    if TURN:
        c = tl.load(cos + d, mask=d < half, other=0.0)
        s = tl.load(sin + half + d, mask=d < half, other=0.0)  # the second half's, which are positive
        precise, other = x.to(tl.float32), y.to(tl.float32)
        _put(out, slots, own, slot, at, precise * c - other * s, inside)
        _put(out, slots, own, slot, at + half, other * c + precise * s, inside)
    else:
        _put(out, slots, own, slot, at, x, inside)
        _put(out, slots, own, slot, at + half, y, inside)
    if TAIL:
        _put(out, slots, own, slot, at_tail, z, inside_tail)


@triton.jit
def qkv_kernel(
    fused, q_weight, k_weight, cos, sin, places, q, k, v, keys, values, eps,
    H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, ROTARY: tl.constexpr,
    HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_H heads of queries, keys or values of one entry."""
    entry = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    kv_tiles: tl.constexpr = (HKV + BLOCK_H - 1) // BLOCK_H
    fused += entry * (H + 2 * HKV) * DH
    cos += entry * ROTARY
    sin += entry * ROTARY
    slot = entry
    if keys is not None:
        slot = tl.load(places + entry).to(tl.int64) * (HKV * DH)  # negative: nowhere
    if tile < q_tiles:
        _heads(fused, q_weight, cos, sin, q, None, entry, slot, tile * BLOCK_H, H, eps,
               True, DH, ROTARY, HALF, TAIL, BLOCK_H)  # fmt: skip
    elif tile < q_tiles + kv_tiles:
        _heads(fused + H * DH, k_weight, cos, sin, k, keys, entry, slot, (tile - q_tiles) * BLOCK_H, HKV, eps,
               True, DH, ROTARY, HALF, TAIL, BLOCK_H)  # fmt: skip
    else:
        tile -= q_tiles + kv_tiles
        _heads(fused + (H + HKV) * DH, None, cos, sin, v, values, entry, slot, tile * BLOCK_H, HKV, eps,
               False, DH, ROTARY, HALF, TAIL, BLOCK_H)  # fmt: skip


Heads = tuple[Tensor, Tensor | None, Tensor | None]


def qkv_rope(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    slots: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
    fresh: bool = True,
) -> Heads:
    """Return rotated queries `[T, H, Dh]`, rotated keys and plain values `[T, Hkv, Dh]` of a pack's fused projection.

    It rounds like `qkv_rope_reference`: after norm, weight and rotation.

    Args:
        fused: `[T, (H + 2 Hkv) Dh]` queries, keys, values.
        cos, sin: float32 `[T, R]` or `[1, 1, T, R]`, see `models.transformer.Rope`. The first R dimensions of a head
            rotate.
        heads: H.
        kv_heads: Hkv.
        q_weight, k_weight: `[Dh]` weights of the norms of each head.
        eps: added to the mean square in these norms.
        slots: keys and values `[B, L+1, Hkv, Dh]`, written in place at `places`.
        places: `[T] int64` slot of each entry, `row * (L+1) + column`. Below 0 the entry is not stored.
        fresh: return keys and values. If false, None is returned for both, and attention reads the slots.
    """
    entries, total = fused.shape
    size = total // (heads + 2 * kv_heads)
    assert slots is None or places is not None
    assert cos.numel() == sin.numel() == entries * cos.shape[-1], "an entry has cosines and sines of its own"
    fused, cos, sin = fused.contiguous(), cos.contiguous(), sin.contiguous()
    q = fused.new_empty(entries, heads, size)
    k, v = (fused.new_empty(entries, kv_heads, size) if fresh else None for _ in range(2))
    keys, values = slots or (None, None)
    if entries:
        shape = tile(heads, kv_heads, size, cos.shape[-1], fused.element_size())
        tiles = cdiv(heads, shape["BLOCK_H"]) + 2 * cdiv(kv_heads, shape["BLOCK_H"])
        launch: dict[str, Any] = {**shape, "num_warps": WARPS, "enable_fp_fusion": True}
        qkv_kernel[entries, tiles](
            fused, q_weight, k_weight, cos, sin, None if places is None else places.contiguous(),
            q, k, v, keys, values, eps, **launch,
        )  # fmt: skip
    return q, k, v


def qkv_rope_reference(
    fused: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    slots: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
    fresh: bool = True,
) -> Heads:
    """Compute `qkv_rope` in torch."""
    size, turned = fused.shape[-1] // (heads + 2 * kv_heads), cos.shape[-1]
    q, k, v = fused.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    c, s = (factors.reshape(-1, 1, turned) for factors in (cos, sin))  # [T, 1, R]

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else F.rms_norm(x, weight.shape, None, eps) * weight
        lead = x[..., :turned]
        lead = torch.addcmul(lead * c, lead.roll(turned // 2, -1), s).to(x.dtype)
        return torch.cat([lead, x[..., turned:]], -1)

    q, k = rotated(q, q_weight), rotated(k, k_weight)
    if slots is not None:
        assert places is not None
        for slot, new in zip(slots, (k, v), strict=True):
            store(slot, places, new)
    return (q, k, v) if fresh else (q, None, None)


def store(slots: Tensor, places: Tensor, fresh: Tensor) -> None:
    """Write `fresh [T, ...]` at `places [T]` of `slots [B, L+1, ...]`, in place. Places below 0 are left out."""
    flat, empty = slots.view(-1, *slots.shape[2:]), slots.shape[1] - 1
    nowhere = (places < 0).view(-1, *[1] * (fresh.dim() - 1))
    # What is stored nowhere goes to an empty slot, which keeps what it has.
    flat.index_copy_(0, places.where(places >= 0, empty), fresh.to(slots.dtype).where(~nowhere, flat[empty]))


def tile(heads: int, kv_heads: int, size: int, rotary: int, itemsize: int) -> dict[str, int]:
    """Return the constants of `qkv_kernel`. BLOCK_H is the number of heads of a program. `itemsize` is in bytes."""
    tail = next_power_of_2(size - rotary) if rotary < size else 0
    half = next_power_of_2(rotary // 2)
    block = max(1, min(next_power_of_2(heads), _BYTES // itemsize // (2 * half + 3 * tail)))
    return {"H": heads, "HKV": kv_heads, "DH": size, "ROTARY": rotary, "HALF": half, "TAIL": tail, "BLOCK_H": block}
