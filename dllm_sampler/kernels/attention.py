"""Attention of a pack: the queries of all rows, one after the other, over stored and fresh keys.

The heads that share a key head are packed into one tile of queries, so keys and values are read once for all of them.
Where queries are few, the keys of a row are dealt to several programs, and a second kernel adds up (flash decoding).
Nothing is written but the answer: `qkv_rope` writes the slots. Who sees whom is decided elsewhere
(`core/visibility.py`): a kernel compares columns with the bound of each entry, and knows no shadows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from dllm_sampler.kernels.configuration import Configuration, cdiv, next_power_of_2
from dllm_sampler.kernels.flash import attention_kernel, combine_kernel
from dllm_sampler.kernels.reference import ENDLESS, Slots

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
    stored: bool = True,
    longest: int | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention output `[T, H, Dh]` of a pack: T entries of a whole batch, sorted by row, segment and column.

    q: `[T, H, Dh]`, rotated
    k, v: `[T, Hkv, Dh]`, the entries' own keys and values (fresh ones). Without them they are in their slots already
    slots: keys and values `[B, L+1, Hkv, Dh]`, the last one empty. Without them nothing is stored
    bounds: int64 `[B+1]`: row b has the entries bounds[b]..bounds[b+1]-1; those from bounds[B] on are fillers
    columns: int64 `[T]`, of the entries
    end: integers `[B]`, columns from here on are hidden; default: L
    until: int64 `[T]`, first column that each entry does not see, at most the row's `end`, which is the default
    segment: integers `[T]`; a fresh key is seen by entries of its own row and segment. Default: by those of its row
    unread: bool `[B, L+1]`, stored columns that no entry sees: fresh keys replace them, or they are hidden
    stored: stored keys are seen. False for a forward that computes every column
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
    either = k if k is not None else keys
    assert either is not None, "neither fresh keys nor stored ones"
    kv_heads, length = either.shape[-2], ENDLESS if slots is None else slots[0].shape[1]
    group = heads // kv_heads
    most = min(longest or entries, entries)
    shape, warps, stages = _shape(most * group, size, q.dtype.itemsize, k is not None)
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
        entries, batch, length, (size**-0.5 if scale is None else scale) * _LOG2E,
        **launch,
    )  # fmt: skip
    if parts is not None:
        lines = out.numel() // size
        launch = {"DH": size, "BLOCK_D": shape["BLOCK_D"], "LINES": _LINES, "num_warps": 4, "enable_fp_fusion": True}
        combine_kernel[(cdiv(lines, _LINES),)](parts, peaks, totals, out, lines, splits, **launch)
    return out


_LINES = 8


def _whole(tensor: Tensor | None) -> Tensor | None:
    """The tensor, made contiguous."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16 and knobs.runtime.interpret:
        tensor = tensor.float()  # Triton's interpreter multiplies the bits of bfloat16 numbers
    return tensor.contiguous()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _places(block_m: int, warps: int, device: torch.device) -> int:
    """Return how many programs a GPU runs at once, by the registers of the binaries for an H100."""
    return _processors(device) * (2 if warps > 4 else 5 if block_m == 16 else 3)


def _splits(programs: int, tiles: int, places: int) -> int:
    """Return how many programs share a row's `tiles` of keys.

    All of them run at once, if they are not more than the places without it. Each has two tiles or more, and none is
    left without.
    """
    wanted = max(1, min(places // programs, cdiv(tiles, 2), 32))
    return cdiv(tiles, cdiv(tiles, wanted))


def _shape(packed: int, size: int, itemsize: int, heavy: bool) -> tuple[dict[str, int], int, int]:
    """Blocks, warps and stages for `packed` queries per key head; heavy: fresh keys want registers too."""
    wide = itemsize > 2  # float32 is multiplied exactly, without tensor cores
    most = (32 if wide else 128) // (2 if heavy else 1)
    block_m = min(max(16, next_power_of_2(packed)), most)
    block_d = next_power_of_2(size)
    keys = 16 if wide and heavy else 32 if wide or heavy or block_d <= 64 else 64  # more spill, on Triton 3.6 at least
    blocks = {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": keys}
    large = block_m * blocks["BLOCK_D"] > 1024
    return blocks, 8 if large and (wide or block_m == most) else 4, 2


def _configuration(
    name: str, dtype: str, size: int, group: int, kv_heads: int, queries: int, *given: str
) -> Configuration:
    """given: the optional arguments that this launch has, and what its integers are."""
    shape, warps, stages = _shape(queries, size, 4 if dtype == "fp32" else 2, "fresh" in given)
    optional = {"k": "fresh", "v": "fresh", "keys": "stored", "values": "stored"}
    optional |= {"segment": "segment", "until": "until", "peaks": "split", "totals": "split"}
    types = dict.fromkeys(("bounds", "positions", "segment", "end", "until"), "*i64") | {"unread": "*u8"}
    types |= {"peaks": "*fp32", "totals": "*fp32", "scale": "fp32", "out": "*fp32" if "split" in given else f"*{dtype}"}
    types |= dict.fromkeys(("q", "k", "v", "keys", "values"), f"*{dtype}")
    constants: dict[str, Any] = shape | {"G": group, "HKV": kv_heads, "DH": size}
    constants |= {argument: None for argument, what in optional.items() if what not in given}
    constants |= {} if {"stored", "fresh"} <= {*given} or "unread" in given else {"unread": None}
    constants |= {"batch": 1} if "one row" in given else {}
    types |= {} if "any entries" in given else {"entries": "i32:16"}
    types |= {"batch": "i32:16"} if "16 rows" in given else {}
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in attention_kernel.arg_names}
    name = f"attention {name} {dtype} Dh={size} queries={shape['BLOCK_M']} {' '.join(given)}"
    return Configuration(name, attention_kernel, signature, constants, warps, stages)


_MODELS = {"LLaDA-8B": (128, 1, 32), "Dream-7B": (128, 7, 4), "SDAR-8B": (128, 4, 8), "LLaDA2-mini": (128, 4, 4)}
_GIVEN = [  # decoding, block-causal; without a cache; fresh keys before stored ones, and drafts; drafts without a cache
    ("stored",),
    ("stored", "split"),
    ("stored", "until", "split"),
    ("fresh",),
    ("fresh", "until"),
    ("stored", "fresh", "split"),
    ("stored", "fresh", "segment", "until", "split"),
    ("fresh", "segment", "until"),
]


def _combination(dtype: str, size: int, one: bool = False) -> Configuration:
    pointers = {"parts": "*fp32", "peaks": "*fp32", "totals": "*fp32", "out": f"*{dtype}"}
    constants = {"DH": size, "BLOCK_D": next_power_of_2(size), "LINES": _LINES} | ({"lines": 1} if one else {})
    signature = pointers | {"lines": "i32:16", "splits": "i32"} | dict.fromkeys(constants, "constexpr")
    name = f"attention combine {dtype} Dh={size}{' one line' if one else ''}"
    return Configuration(name, combine_kernel, signature, constants)


CONFIGURATIONS = [
    *(
        _configuration(name, "bf16", *_MODELS[name], queries, *given)
        for name in ("LLaDA-8B", "Dream-7B")
        for queries in (16, 128)
        for given in _GIVEN
    ),
    *(
        _configuration("LLaDA-8B", "bf16", *_MODELS["LLaDA-8B"], queries, *given, "one row")
        for queries, given in (
            *((queries, ("stored", "split")) for queries in (16, 32, 64, 128)),
            *((queries, ("fresh",)) for queries in (16, 32, 128)),
        )
    ),
    *(  # a few rows of 32 positions, hidden columns, and a number of entries that nothing divides
        _configuration("LLaDA-8B", "bf16", *_MODELS["LLaDA-8B"], 32, "stored", "split", *given)
        for given in ((), ("unread", "one row"), ("any entries", "one row"))
    ),
    *(  # 16 or 64 rows of 32 positions; one row that is refreshed
        _configuration(name, "bf16", *model, queries * model[1], *given)
        for name, model in _MODELS.items()
        for queries, given in (
            (32, ("stored", "16 rows")),
            (32, ("stored", "until", "16 rows")),
            (2048, ("stored", "one row")),
        )
    ),
    *(
        _configuration("heads", dtype, size, 4, 8, 32, *given)
        for dtype in ("bf16", "fp32")
        for size in (64, 80, 128)
        for given in (("stored", "split"), ("stored", "fresh", "segment", "until", "split"))
    ),
    *(_combination(dtype, size) for dtype in ("bf16", "fp32") for size in (64, 80, 128)),
    _combination("bf16", 128, one=True),
]
