"""Attention of a pack: the queries of all rows, one after the other, over stored and fresh keys.

The heads that share a key head are packed into one tile of queries, so keys and values are read once for all of them.
If queries are few, the keys of a row are split among several programs, and a second kernel combines their sums (flash
decoding). Only the output is written: `qkv_rope` writes the slots. `core/visibility.py` decides what an entry sees. The
kernel compares columns with the bound of each entry, and does not support shadow rows.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from dllm_sampler.kernels.flash import attention_kernel, combine_kernel
from dllm_sampler.kernels.reference import ENDLESS, Slots
from dllm_sampler.kernels.sizes import cdiv, next_power_of_2

_LOG2E = 1.4426950408889634


def packed_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    bounds: Tensor,
    columns: Tensor,
    *,
    end: Tensor | None = None,
    until: Tensor | None = None,
    segment: Tensor | None = None,
    unread: Tensor | None = None,
    longest: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return attention output `[T, H, Dh]` of a pack: T entries of a whole batch, sorted by row, segment and column.

    The output is 0 for an entry that sees nothing and for a filler. A slot that no entry sees is not read.

    Args:
        q: `[T, H, Dh]` rotated queries.
        k, v: `[T, Hkv, Dh]` keys and values of the entries (fresh ones). None if the slots have them already.
        slots: stored keys and values `[B, L+1, Hkv, Dh]`. The last slot is empty. None if nothing is stored.
        bounds: `[B+1] int64`. Row b has the entries bounds[b]..bounds[b+1]-1. Those from bounds[B] on are fillers.
        columns: `[T] int64` columns of the entries.
        end: `[B]` columns from here on are hidden. The default is L.
        until: `[T] int64` first column that each entry does not see, at most the row's `end`, which is the default.
        segment: `[T]` integers. An entry sees fresh keys of its own row and segment only. By default of its row.
        unread: `[B, L+1] bool` stored columns that no entry sees: fresh keys replace them, or they are hidden.
        longest: upper bound on the entries of a row. The default is T.
        splits: programs that share the keys of a row. By default enough to fill the GPU.
    """
    entries, heads, size = q.shape
    batch, out = len(bounds) - 1, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    keys, values = slots or (None, None)
    either = k if k is not None else keys
    assert either is not None, "neither fresh keys nor stored ones"
    kv_heads, length = either.shape[-2], ENDLESS if slots is None else slots[0].shape[1]
    group = heads // kv_heads
    most = min(longest or entries, entries)
    shape, warps, stages = tile(most * group, size, q.dtype.itemsize, k is not None)
    if splits is None:
        seen = (0 if keys is None else length) + (0 if k is None else most)
        programs = max(cdiv(entries * group, shape["BLOCK_M"]), min(entries, batch)) * kv_heads
        splits = _splits(programs, cdiv(seen, shape["BLOCK_N"]), _places(shape["BLOCK_M"], warps, q.device))
    parts = peaks = totals = None
    if splits > 1:
        peaks, totals = torch.empty(2, splits, entries, heads, dtype=torch.float32, device=q.device)
        parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    hidden = _whole(unread)
    launch: dict[str, Any] = {"G": group, "HKV": kv_heads, "DH": size, **shape}
    launch |= {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    tiles = (entries * group + batch * (shape["BLOCK_M"] - 1)) // shape["BLOCK_M"]  # at most
    attention_kernel[kv_heads, splits, tiles](
        _whole(q), _whole(k), _whole(v), keys, values, _whole(bounds), _whole(columns), _whole(segment),
        _whole(end), _whole(until), None if hidden is None else hidden.view(torch.uint8),
        out if parts is None else parts, peaks, totals,
        entries, batch, length, size**-0.5 * _LOG2E,
        **launch,
    )  # fmt: skip
    if parts is not None:
        lines = out.numel() // size
        launch = {"DH": size, "BLOCK_D": shape["BLOCK_D"], "LINES": LINES, "num_warps": 4, "enable_fp_fusion": True}
        combine_kernel[(cdiv(lines, LINES),)](parts, peaks, totals, out, lines, splits, **launch)
    return out


LINES = 8


def _whole(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, contiguous, and in float32 instead of bfloat16 for Triton's interpreter."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16 and knobs.runtime.interpret:
        tensor = tensor.float()  # Triton's interpreter multiplies the bits of bfloat16 numbers
    return tensor.contiguous()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _places(block_m: int, warps: int, device: torch.device) -> int:
    """Return the number of programs that a GPU runs at once, by the registers that they take on an H100."""
    return _processors(device) * (2 if warps > 4 else 5 if block_m == 16 else 3)


def _splits(programs: int, tiles: int, places: int) -> int:
    """Return the number of programs that share a row's `tiles` of keys, all but the last with at least two.

    A launch has `programs` if none share keys. Sharing does not exceed `places`, which the GPU runs at once.
    """
    wanted = max(1, min(places // programs, cdiv(tiles, 2), 32))
    return cdiv(tiles, cdiv(tiles, wanted))


def tile(packed: int, size: int, itemsize: int, heavy: bool) -> tuple[dict[str, int], int, int]:
    """Return block sizes, warps and stages of the attention kernel.

    Args:
        packed: queries per key head in the longest row.
        size: width of a head.
        itemsize: bytes of a number.
        heavy: there are fresh keys, which take registers.
    """
    wide = itemsize > 2  # float32 is multiplied exactly, without tensor cores
    most = (32 if wide else 128) // (2 if heavy else 1)
    block_m = min(max(16, next_power_of_2(packed)), most)
    block_d = next_power_of_2(size)
    keys = 16 if wide and heavy else 32 if wide or heavy or block_d <= 64 else 64  # more spill, on Triton 3.6 at least
    blocks = {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": keys}
    large = block_m * blocks["BLOCK_D"] > 1024
    return blocks, 8 if large and (wide or block_m == most) else 4, 2
