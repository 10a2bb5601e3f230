"""Attention of a window's queries over stored and fresh keys; the same launch stores the fresh ones.

The heads that share a key head are packed into one tile of queries, so keys and values are read once for all of them.
Where queries are few, the keys of a row are dealt to several programs, and a second kernel adds up (flash decoding).

No program reads a slot that another one of the launch writes: fresh keys come from the fresh tensors, their slots are
left out of the stored ones. The program that attends to a fresh tile for the first tile of queries stores it.
"""

# It takes reductions for tuples.
# pyright: reportOperatorIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from dllm_sampler.kernels.configuration import Configuration, cdiv, next_power_of_2
from dllm_sampler.kernels.rope import put

_LOG2E = 1.4426950408889634


@triton.jit
def _attend(query, key, value, allowed, scale, peak, total, acc):
    """One tile of keys for one tile of queries: running maximum, sum and output."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(allowed, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return highest, total * fade + tl.sum(weight, 1), acc


@triton.jit
def attention_kernel(
    q, k, v, keys, values, positions, begin, limit, overwritten, mask, tree, out, peaks, totals,
    rows, width, columns, q_row, q_m, k_row, k_m, v_row, v_m, mask_row, mask_m, tree_row, tree_m, grid, share, scale,
    G: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, STORED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of the G heads of one key head, for its part of the keys."""
    tile, split = tl.program_id(0), tl.program_id(2)
    head, n = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    b = (n // share).to(tl.int64)  # the row of the slots
    d = tl.arange(0, BLOCK_D)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m = packed // G
    query_head = head * G + packed % G
    there = m < rows
    # Strides are in heads, so that the compiler knows how rows are aligned; only offsets of whole rows take 64 bits.
    q += n.to(tl.int64) * q_row * DH
    query = tl.load(
        q + m[:, None] * (q_m * DH) + query_head[:, None] * DH + d[None],
        mask=there[:, None] & (d[None] < DH),
        other=0.0,
    )
    if keys is not None:
        keys += b * columns * (HKV * DH) + head * DH
        values += b * columns * (HKV * DH) + head * DH
    if k is not None:
        k += n.to(tl.int64) * k_row * DH + head * DH
        v += n.to(tl.int64) * v_row * DH + head * DH
    at = tl.load(positions + b * width + m % width, mask=there, other=columns - 1)
    live = at < columns - 1  # fillers see nothing

    if mask is not None:
        mask += b * mask_row
    if tree is not None:
        tree += b * tree_row

    low = 0
    high = columns - 1
    if begin is not None:
        low = tl.load(begin + b).to(tl.int32)
    if limit is not None:
        high = tl.minimum(tl.load(limit + b).to(tl.int32), high)
    end = tl.max(tl.where(live, high, low), 0)  # a tile of fillers reads nothing
    own = (at * 0).to(tl.int32)
    if grid is not None:
        own = tl.maximum(at.to(tl.int32) - low, 0) // grid
        end = tl.minimum(end, low + (tl.max(tl.where(live, own, -1), 0) + 1) * grid)

    tiles_stored = 0
    if STORED:
        tiles_stored = tl.maximum(end - low + BLOCK_N - 1, 0) // BLOCK_N
    tiles = tiles_stored
    if k is not None:
        tiles += tl.cdiv(rows, BLOCK_N)
    part = tl.cdiv(tiles, tl.num_programs(2))
    first = split * part
    last = tl.minimum(first + part, tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if STORED:
        for t in range(first, tl.minimum(last, tiles_stored)):
            column = low + t * BLOCK_N + tl.arange(0, BLOCK_N)
            seen = column < end
            if overwritten is not None:
                seen = seen & (tl.load(overwritten + b * columns + column, mask=seen, other=1) == 0)
            allowed = live[:, None] & seen[None]
            if grid is not None:
                allowed = allowed & ((column - low)[None] < (own[:, None] + 1) * grid)
            if mask is not None:
                shown = tl.load(mask + (m % width)[:, None] * mask_m + column[None], mask=allowed, other=0)
                allowed = allowed & (shown != 0)
                seen = tl.max(allowed.to(tl.int32), 0) > 0
            slot = column[:, None] * (HKV * DH) + d[None]
            inside = seen[:, None] & (d[None] < DH)
            key = tl.load(keys + slot, mask=inside, other=0.0).to(query.dtype)
            value = tl.load(values + slot, mask=inside, other=0.0).to(query.dtype)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)
    if k is not None:
        fresh, until = tl.maximum(first, tiles_stored) - tiles_stored, last - tiles_stored
        for t in range(fresh, until):
            j = t * BLOCK_N + tl.arange(0, BLOCK_N)
            column = tl.load(positions + b * width + j % width, mask=j < rows, other=columns - 1).to(tl.int32)
            seen = (column >= low) & (column < high)
            allowed = live[:, None] & seen[None]
            if grid is not None:
                allowed = allowed & ((column - low)[None] < (own[:, None] + 1) * grid)
            if mask is not None:
                shown = tl.load(mask + (m % width)[:, None] * mask_m + column[None], mask=allowed, other=0)
                allowed = allowed & (shown != 0)
            if tree is not None:
                shown = tl.load(tree + m[:, None] * tree_m + j[None], mask=allowed, other=0)
                allowed = allowed & (shown != 0)
            inside = seen[:, None] & (d[None] < DH)
            key = tl.load(k + j[:, None] * (k_m * DH) + d[None], mask=inside, other=0.0)
            value = tl.load(v + j[:, None] * (v_m * DH) + d[None], mask=inside, other=0.0)
            peak, total, acc = _attend(query, key, value, allowed, scale, peak, total, acc)
        if keys is not None:  # noqa: SIM102 (this one is known when compiling)
            if (tile == 0) & (n % share == 0):  # candidate 0 alone is stored
                for t in range(fresh, until):
                    j = t * BLOCK_N + tl.arange(0, BLOCK_N)
                    column = tl.load(positions + b * width + j, mask=j < width, other=columns - 1).to(tl.int32)
                    slot = column[:, None] * (HKV * DH) + d[None]
                    real = (column < columns - 1)[:, None] & (d[None] < DH)
                    tl.store(keys + slot, tl.load(k + j[:, None] * (k_m * DH) + d[None], mask=real), mask=real)
                    tl.store(values + slot, tl.load(v + j[:, None] * (v_m * DH) + d[None], mask=real), mask=real)

    before = (split * (tl.num_programs(1) // HKV) + n).to(tl.int64) * rows * (HKV * G)
    line = m * (HKV * G) + query_head
    if peaks is not None:
        tl.store(peaks + before + line, peak, mask=there)
        tl.store(totals + before + line, total, mask=there)
    else:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + before * DH + line[:, None] * DH + d[None], acc, mask=there[:, None] & (d[None] < DH))


@triton.jit
def combine_kernel(
    parts, peaks, totals, out, lines, splits, DH: tl.constexpr, BLOCK_D: tl.constexpr, LINES: tl.constexpr
):
    """One program: LINES lines (row, query, head) of the output, added up over the parts of the keys."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    d = tl.arange(0, BLOCK_D)
    inside = (line < lines)[:, None] & (d[None] < DH)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for split in range(splits):
        there = line + split * tl.cast(lines, tl.int64)
        its = tl.load(peaks + there, mask=line < lines, other=float("-inf"))
        highest = tl.maximum(peak, its)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weight = tl.exp2(peak - base), tl.exp2(its - base)
        total = total * fade + tl.load(totals + there, mask=line < lines, other=0.0) * weight
        part = tl.load(parts + there[:, None] * DH + d[None], mask=inside, other=0.0)
        acc = acc * fade[:, None] + part * weight[:, None]
        peak = highest
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * DH + d[None], acc, mask=inside)


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
    most = 32 if wide else 64 if heavy else 128
    block_m = min(max(16, next_power_of_2(packed)), most)
    blocks = {"BLOCK_D": next_power_of_2(size), "BLOCK_M": block_m, "BLOCK_N": 32 if wide or heavy else 64}
    return blocks, 8 if wide or block_m == most else 4, 2


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
