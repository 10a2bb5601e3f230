"""Attention of a window's queries over stored and fresh keys; the same launch stores the fresh ones.

The heads that share a key head are packed into one tile of queries, so keys and values are read once for all of them.
Where queries are few, the keys of a row are dealt to several programs, and a second kernel adds up (flash decoding).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import knobs

from dllm_sampler.kernels.configuration import Configuration, cdiv, next_power_of_2
from dllm_sampler.kernels.flash import attention_kernel, combine_kernel, packed_kernel
from dllm_sampler.kernels.rope import put

_LOG2E = 1.4426950408889634


Slots = tuple[Tensor, Tensor]


def block_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    positions: Tensor,
    *,
    begin: Tensor | None = None,
    limit: Tensor | None = None,
    grid: int | None = None,
    mask: Tensor | None = None,
    tree: Tensor | None = None,
    overwritten: Tensor | None = None,
    stored: bool = True,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention output `[N, R, H, Dh]` of queries over stored and fresh keys; stores the fresh ones, in place.

    N = B * K candidates on the batch axis, or R = K * M of them side by side; one is 1. Candidate 0 alone is stored.

    q: `[N, R, H, Dh]`, rotated
    k, v: `[N, R, Hkv, Dh]`, the queries' own keys and values; None: they are in their slots already
    slots: keys and values `[B, L+1, Hkv, Dh]`, the last one empty; None: nothing is stored
    positions: int64 `[B, M]`, the queries' columns, each once; L for a filler, which sees nothing and is not stored
    begin, limit: `[B]`, keys of columns begin..limit-1 may be seen; default: 0 and L
    grid: block-causal attention with blocks of so many columns, counted from `begin`
    mask: bool `[B|1, M|1, L+1]`, columns that a position may see, of the above
    tree: bool `[B|1, R, R]`, fresh keys that a query may see, of the above
    overwritten: bool `[B, L+1]`, `columns_of(positions, L+1)` where a caller has it for all layers
    stored: whether there is anything to see but the fresh keys; false for a forward that computes every column
    scale: of the scores; default `Dh ** -0.5`
    splits: programs that share the keys of a row; default: enough to fill the GPU

    A query that sees nothing answers zeros. A slot that no query of a tile sees is not read, whatever is in it.
    """
    rows, size, heads = q.shape[1], q.shape[3], q.shape[2]
    batch, width = positions.shape
    share, keys, values, columns = _extents(q, k, slots, positions, mask)
    given = k if k is not None else keys
    assert given is not None, "neither fresh keys nor stored ones"
    kv_heads = given.shape[2]
    reads = stored and keys is not None
    if k is None or not reads:
        overwritten = None
    elif overwritten is None:
        overwritten = columns_of(positions, columns)
    mask = None if mask is None else mask.expand(batch, width, columns).view(torch.uint8)
    tree = None if tree is None else tree.expand(batch, rows, rows).view(torch.uint8)
    shape, warps, stages = _shape(rows * heads // kv_heads, size, q.dtype.itemsize, k is not None or mask is not None)
    tiles = cdiv(rows * heads // kv_heads, shape["BLOCK_M"])
    if splits is None:
        length = (columns if reads else 0) + (rows if k is not None else 0)
        splits = _splits(tiles * len(q) * kv_heads, cdiv(length, shape["BLOCK_N"]), q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    q, k, v = _rows(q), None if k is None else _rows(k), None if v is None else _rows(v)
    parts = peaks = totals = None
    if splits > 1:
        peaks, totals = torch.empty(2, splits, *q.shape[:3], dtype=torch.float32, device=q.device)
        parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    launch: dict[str, Any] = {"G": heads // kv_heads, "HKV": kv_heads, "DH": size, "STORED": reads, **shape}
    launch |= {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    attention_kernel[tiles, len(q) * kv_heads, splits](
        q, k, v, keys, values, positions.contiguous(), begin, limit,
        None if overwritten is None else overwritten.view(torch.uint8), mask, tree,
        out if parts is None else parts, peaks, totals,
        rows, width, columns, *_strides(q, size), *_strides(k, size), *_strides(v, size),
        *_strides(mask), *_strides(tree), grid, share, (size**-0.5 if scale is None else scale) * _LOG2E,
        **launch,
    )  # fmt: skip
    if parts is not None:
        lines = out.numel() // size
        launch = {"DH": size, "BLOCK_D": shape["BLOCK_D"], "LINES": _LINES, "num_warps": 4, "enable_fp_fusion": True}
        combine_kernel[(cdiv(lines, _LINES),)](parts, peaks, totals, out, lines, splits, **launch)
    return out


def attention_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    positions: Tensor,
    *,
    begin: Tensor | None = None,
    limit: Tensor | None = None,
    grid: int | None = None,
    mask: Tensor | None = None,
    tree: Tensor | None = None,
    overwritten: Tensor | None = None,
    stored: bool = True,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """What `block_attention` computes, in torch; `splits` changes nothing."""
    batch, width = positions.shape
    rows = q.shape[1]
    share, keys, values, columns = _extents(q, k, slots, positions, mask)
    at = positions.repeat(1, rows // width)  # [B, R]
    low = torch.zeros_like(at[:, :1]) if begin is None else begin[:, None]
    high = torch.full_like(low, columns - 1) if limit is None else limit[:, None].clamp(max=columns - 1)

    def sees(column: Tensor) -> Tensor:  # of columns [B, X]: [B, R, X]
        seen = (at < columns - 1)[..., None] & ((column >= low) & (column < high))[:, None]
        if grid is not None:
            seen = seen & ((column - low)[:, None] < (((at - low).clamp(min=0) // grid + 1) * grid)[..., None])
        if mask is not None:
            shown = mask.expand(batch, width, columns).repeat(1, rows // width, 1)  # [B, R, L+1]
            seen = seen & shown.gather(2, column[:, None].expand(-1, rows, -1))
        return seen

    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # keys, values, who sees them
    if stored and keys is not None and values is not None:
        seen = sees(torch.arange(columns, device=at.device).expand(batch, -1))
        if k is not None:
            hidden = columns_of(positions, columns) if overwritten is None else overwritten
            seen = seen & ~hidden[:, None]
        old = [x.repeat_interleave(share, 0).to(q.dtype) for x in (keys, values)]
        parts.append((old[0], old[1], seen))
    if k is not None and v is not None:
        parts.append((k, v, sees(at) if tree is None else sees(at) & tree))
    seen = torch.cat([part[2] for part in parts], -1).repeat_interleave(share, 0)  # [N, R, S]
    read = seen.any(1)[..., None, None]  # [N, S, 1, 1]: zero times a slot that holds no number would be none either
    every = (torch.cat([part[i] for part in parts], 1).where(read, 0).transpose(1, 2) for i in (0, 1))
    grouped = parts[0][0].shape[2] != q.shape[2]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), *every, attn_mask=seen[:, None], scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
    if keys is not None and values is not None and k is not None and v is not None:
        put(keys, positions, k[::share, :width])
        put(values, positions, v[::share, :width])
    return out.where(seen.any(-1)[..., None, None], 0)


def packed_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    bounds: Tensor,
    columns: Tensor,
    *,
    begin: Tensor | None = None,
    limit: Tensor | None = None,
    grid: int | None = None,
    segment: Tensor | None = None,
    overwritten: Tensor | None = None,
    stored: bool = True,
    longest: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention output `[T, H, Dh]` of a pack: T entries of a whole batch, sorted by row, segment and column.

    q: `[T, H, Dh]`, rotated
    k, v: `[T, Hkv, Dh]`, the entries' own keys and values (fresh ones); None: they are in their slots already
    slots: keys and values `[B, L+1, Hkv, Dh]`, the last one empty; None: nothing is stored
    bounds: int64 `[B+1]`: row b has the entries bounds[b]..bounds[b+1]-1; those from bounds[B] on are fillers
    columns: int64 `[T]`, where the entries stand
    begin, limit: `[B]`, keys of columns begin..limit-1 may be seen; default: 0 and L
    grid: block-causal attention with blocks of so many columns, counted from `begin`
    segment: integers `[T]`; a fresh key is seen by entries of its own row and segment. Default: by those of its row
    overwritten: bool `[B, L+1]`, stored columns that nobody sees, since fresh keys stand in for them
    stored: whether stored keys are seen; false for a forward that computes every column
    longest: a row has no more entries than that; default T
    scale: of the scores; default `Dh ** -0.5`
    splits: programs that share the keys of a row; default: enough to fill the GPU

    An entry that sees nothing answers zeros, and so does a filler. A slot that no entry sees is not read.
    """
    entries, heads, size = q.shape
    batch, out = len(bounds) - 1, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    keys, values = slots if slots is not None and stored else (None, None)
    given = k if k is not None else keys
    assert given is not None, "neither fresh keys nor stored ones"
    kv_heads, length = given.shape[-2], _ENDLESS if slots is None else slots[0].shape[1]
    group = heads // kv_heads
    most = min(longest or entries, entries)
    shape, warps, stages = _shape(most * group, size, q.dtype.itemsize, k is not None)
    if splits is None:
        seen = (0 if keys is None else length) + (0 if k is None else most)
        programs = max(cdiv(entries * group, shape["BLOCK_M"]), min(entries, batch)) * kv_heads
        splits = _splits(programs, cdiv(seen, shape["BLOCK_N"]), q.device)
    parts = peaks = totals = None
    if splits > 1:
        peaks, totals = torch.empty(2, splits, entries, heads, dtype=torch.float32, device=q.device)
        parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    hidden = _whole(overwritten)
    launch: dict[str, Any] = {"G": group, "HKV": kv_heads, "DH": size, **shape}
    launch |= {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    tiles = (entries * group + batch * (shape["BLOCK_M"] - 1)) // shape["BLOCK_M"]  # at most
    packed_kernel[kv_heads, splits, tiles](
        _whole(q), _whole(k), _whole(v), keys, values, _whole(bounds), _whole(columns), _whole(segment),
        _whole(begin), _whole(limit), None if hidden is None else hidden.view(torch.uint8),
        out if parts is None else parts, peaks, totals,
        entries, batch, length, grid, (size**-0.5 if scale is None else scale) * _LOG2E,
        **launch,
    )  # fmt: skip
    if parts is not None:
        lines = out.numel() // size
        launch = {"DH": size, "BLOCK_D": shape["BLOCK_D"], "LINES": _LINES, "num_warps": 4, "enable_fp_fusion": True}
        combine_kernel[(cdiv(lines, _LINES),)](parts, peaks, totals, out, lines, splits, **launch)
    return out


def packed_attention_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    bounds: Tensor,
    columns: Tensor,
    *,
    begin: Tensor | None = None,
    limit: Tensor | None = None,
    grid: int | None = None,
    segment: Tensor | None = None,
    overwritten: Tensor | None = None,
    stored: bool = True,
    longest: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """What `packed_attention` computes, in torch, padded to the longest row; `splits` changes nothing."""
    entries, batch = len(q), len(bounds) - 1
    if not q.numel():
        return torch.empty_like(q)
    length = _ENDLESS if slots is None else slots[0].shape[1]
    index = torch.arange(entries, device=q.device)
    at = bounds[:-1, None] + index[: longest or entries]  # [B, M]
    real = at < bounds[1:, None]
    at = at.clamp(max=entries - 1)
    own = columns[at]
    low = torch.zeros_like(at[:, :1]) if begin is None else begin[:, None]
    high = torch.full_like(low, length - 1) if limit is None else limit[:, None].clamp(max=length - 1)

    def sees(column: Tensor) -> Tensor:  # of columns [B, X]: [B, M, X]
        seen = real[..., None] & ((column >= low) & (column < high))[:, None]
        if grid is not None:
            seen = seen & ((column - low)[:, None] < (((own - low).clamp(min=0) // grid + 1) * grid)[..., None])
        return seen

    keys, values, visible = [], [], []
    if stored and slots is not None:
        keys.append(slots[0].to(q.dtype))
        values.append(slots[1].to(q.dtype))
        visible.append(sees(torch.arange(length, device=q.device).expand(batch, -1)))
        if overwritten is not None:
            visible[0] = visible[0] & ~overwritten[:, None]
    if k is not None and v is not None:
        keys.append(k[at])
        values.append(v[at])
        visible.append(sees(own) & real[:, None])
        if segment is not None:
            visible[-1] = visible[-1] & (segment[at][:, :, None] == segment[at][:, None])
    seen = torch.cat(visible, -1)  # [B, M, S]
    read = seen.any(1)[..., None, None]  # [B, S, 1, 1]: zero times a slot that holds no number would be none either
    every = (torch.cat(parts, 1).where(read, 0).transpose(1, 2) for parts in (keys, values))
    grouped = keys[0].shape[2] != q.shape[1]
    out = F.scaled_dot_product_attention(
        q[at].transpose(1, 2), *every, attn_mask=seen[:, None], scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
    out = out.where(seen.any(-1)[..., None, None], 0)  # [B, M, H, Dh]
    row = torch.searchsorted(bounds[1:], index, right=True)
    place = index - bounds[row]
    filler = (row == batch)[:, None, None]
    return out[row.clamp(max=batch - 1), place.clamp(max=out.shape[1] - 1)].masked_fill(filler, 0)


def columns_of(positions: Tensor, columns: int) -> Tensor:
    """`[B, columns] bool` which columns `positions [B, M]` name."""
    found = torch.zeros(len(positions), columns, dtype=torch.bool, device=positions.device)
    return found.scatter_(1, positions.long(), True)


_LINES = 8
_ENDLESS = 1 << 30  # columns where nothing is stored and no mask says how many there are


def _extents(
    q: Tensor, k: Tensor | None, slots: Slots | None, positions: Tensor, mask: Tensor | None
) -> tuple[int, Tensor | None, Tensor | None, int]:
    """Candidates on the batch axis, stored keys and values, and the number of columns."""
    keys, values = slots or (None, None)
    columns = _ENDLESS if mask is None else mask.shape[-1]
    return len(q) // len(positions), keys, values, columns if keys is None else keys.shape[1]


def _rows(heads: Tensor) -> Tensor:
    """`[N, R, H, Dh]` with the heads of a row together in memory, and whole heads between rows."""
    if heads.dtype == torch.bfloat16 and knobs.runtime.interpret:
        heads = heads.float()  # Triton's interpreter multiplies matrices of bfloat16 by their bits
    size = heads.shape[3]
    whole = heads.stride()[2:] == (size, 1) and not heads.stride(0) % size and not heads.stride(1) % size
    return heads if whole else heads.contiguous()


def _whole(tensor: Tensor | None) -> Tensor | None:
    """The same without gaps in memory."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16 and knobs.runtime.interpret:
        tensor = tensor.float()  # Triton's interpreter multiplies matrices of bfloat16 by their bits
    return tensor.contiguous()


def _strides(tensor: Tensor | None, unit: int = 1) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0) // unit, tensor.stride(1) // unit)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(programs: int, tiles: int, device: torch.device) -> int:
    """Parts to deal a row's `tiles` of keys out in: two programs per processor, two tiles each at least."""
    return max(1, min(2 * _processors(device) // programs, tiles // 2, 32))


def _shape(packed: int, size: int, itemsize: int, heavy: bool) -> tuple[dict[str, int], int, int]:
    """Blocks, warps and stages for `packed` queries per key head; heavy: fresh keys or masks want registers too."""
    wide = itemsize > 2  # float32 is multiplied exactly, without tensor cores
    most = (32 if wide else 128) // (2 if heavy else 1)
    block_m = min(max(16, next_power_of_2(packed)), most)
    blocks = {"BLOCK_D": next_power_of_2(size), "BLOCK_M": block_m, "BLOCK_N": 32 if wide or heavy else 64}
    large = block_m * blocks["BLOCK_D"] > 1024
    return blocks, 8 if large and (wide or block_m == most) else 4, 2


def _configuration(
    name: str, dtype: str, size: int, group: int, kv_heads: int, packed: int, *given: str
) -> Configuration:
    """given: the optional arguments that this launch has."""
    shape, warps, stages = _shape(packed, size, 4 if dtype == "fp32" else 2, "fresh" in given or "mask" in given)
    optional = {"k": "fresh", "v": "fresh", "overwritten": "fresh", "begin": "range", "limit": "range"}
    optional |= {"mask": "mask", "tree": "tree", "grid": "grid", "peaks": "split", "totals": "split"}
    types = {"positions": "*i64", "begin": "*i64", "limit": "*i64", "overwritten": "*u8", "mask": "*u8", "tree": "*u8"}
    types |= {"peaks": "*fp32", "totals": "*fp32", "scale": "fp32", "out": "*fp32" if "split" in given else f"*{dtype}"}
    types |= dict.fromkeys(("q", "k", "v", "keys", "values"), f"*{dtype}")
    constants = shape | {"G": group, "HKV": kv_heads, "DH": size, "STORED": "alone" not in given}
    constants |= dict.fromkeys(("keys", "values", "overwritten") if "alone" in given else ())
    constants |= {argument: None for argument, what in optional.items() if what not in given}
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in attention_kernel.arg_names}
    name = f"attention {name} {dtype} Dh={size} rows={shape['BLOCK_M']} {' '.join(given)}".strip()
    return Configuration(name, attention_kernel, signature, constants, warps, stages)


_MODELS = {"LLaDA-8B": (128, 1, 32), "Dream-7B": (128, 7, 4), "SDAR-8B": (128, 4, 8), "LLaDA2-mini": (128, 4, 4)}
_GIVEN = [  # decoding, block-causal, drafts, one that stores, a cache's own mask; without a cache, and drafts then
    ("range",),
    ("range", "split"),
    ("range", "grid", "split"),
    ("range", "fresh", "tree", "grid", "split"),
    ("range", "fresh"),
    ("mask", "split"),
    ("range", "fresh", "alone"),
    ("range", "fresh", "tree", "grid", "alone"),
]


def _combination(dtype: str, size: int, one: bool = False) -> Configuration:
    pointers = {"parts": "*fp32", "peaks": "*fp32", "totals": "*fp32", "out": f"*{dtype}"}
    constants = {"DH": size, "BLOCK_D": next_power_of_2(size), "LINES": _LINES} | ({"lines": 1} if one else {})
    signature = pointers | {"lines": "i32", "splits": "i32"} | dict.fromkeys(constants, "constexpr")
    name = f"attention combine {dtype} Dh={size}{' one line' if one else ''}"
    return Configuration(name, combine_kernel, signature, constants)


CONFIGURATIONS = [
    *(
        _configuration(name, "bf16", *model, packed, *given)
        for name, model in _MODELS.items()
        for packed in (16, 128)
        for given in _GIVEN
    ),
    *(
        _configuration("heads", dtype, size, 4, 8, packed, *given)
        for dtype in ("bf16", "fp16", "fp32")
        for size in (64, 80, 96, 128)
        for packed in (32,)
        for given in (("range", "split"), ("range", "fresh", "tree", "grid", "split"))
    ),
    *(_combination(dtype, size) for dtype in ("bf16", "fp16", "fp32") for size in (64, 80, 96, 128)),
    _combination("bf16", 128, one=True),
]


def _packed(name: str, dtype: str, size: int, group: int, kv_heads: int, queries: int, *given: str) -> Configuration:
    """given: the optional arguments that this launch has."""
    shape, warps, stages = _shape(queries, size, 4 if dtype == "fp32" else 2, "fresh" in given)
    optional = {"k": "fresh", "v": "fresh", "keys": "stored", "values": "stored", "begin": "range", "limit": "range"}
    optional |= {"segment": "segment", "grid": "grid", "peaks": "split", "totals": "split"}
    types = dict.fromkeys(("bounds", "positions", "segment", "begin", "limit"), "*i64") | {"overwritten": "*u8"}
    types |= {"peaks": "*fp32", "totals": "*fp32", "scale": "fp32", "out": "*fp32" if "split" in given else f"*{dtype}"}
    types |= dict.fromkeys(("q", "k", "v", "keys", "values"), f"*{dtype}")
    constants: dict[str, Any] = shape | {"G": group, "HKV": kv_heads, "DH": size}
    constants |= {argument: None for argument, what in optional.items() if what not in given}
    constants |= {} if {"stored", "fresh"} <= {*given} else {"overwritten": None}
    constants |= {"batch": 1} if "row" in given else {}
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in packed_kernel.arg_names}
    name = f"packed attention {name} {dtype} Dh={size} queries={shape['BLOCK_M']} {' '.join(given)}"
    return Configuration(name, packed_kernel, signature, constants, warps, stages)


_PACKED = [  # decoding, block-causal; without a cache; drafts with one and without
    ("stored", "range"),
    ("stored", "range", "split"),
    ("stored", "range", "grid", "split"),
    ("fresh", "range"),
    ("fresh", "range", "grid"),
    ("stored", "fresh", "range", "split"),
    ("stored", "fresh", "range", "segment", "grid", "split"),
    ("fresh", "range", "segment", "grid"),
]
CONFIGURATIONS += [
    *(
        _packed(name, "bf16", *model, queries, *given)
        for name, model in _MODELS.items()
        for queries in (16, 128)
        for given in _PACKED
    ),
    *(
        _packed("one", "bf16", 128, 1, 32, queries, *given, "row")
        for queries in (16, 128)
        for given in (("stored", "range", "split"), ("fresh", "range"))
    ),
    *(
        _packed("heads", dtype, size, 4, 8, 32, *given)
        for dtype in ("bf16", "fp16", "fp32")
        for size in (64, 80, 96, 128)
        for given in (("stored", "range", "split"), ("stored", "fresh", "range", "segment", "grid", "split"))
    ),
]
