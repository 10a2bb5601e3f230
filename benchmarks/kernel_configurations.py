"""Configurations of every kernel: what `kernels.py --aot` compiles, and what tests compare launches with.

They are the launches of LLaDA-8B, Dream-7B, SDAR-8B and LLaDA2-mini, and a few of other types and widths. Importing
this module needs triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm_sampler.kernels import attention, flash, head, linear, norm, partial, readout, rope, swiglu
from dllm_sampler.kernels.sampling import Sampling
from dllm_sampler.kernels.sizes import cdiv, next_power_of_2


@dataclass(frozen=True)
class Configuration:
    """One specialisation of a kernel.

    name: of the kernel and what sets this one apart, such as "readout bf16 V=126464"
    kernel: the `triton.jit` function
    signature: Triton's type of each argument, such as "*bf16", "i32", or "constexpr"; "i32:16" for an integer that is a
        multiple of 16 in this launch, which Triton compiles a binary of its own for
    constants: the values of those that are "constexpr"
    warps, stages: as in a launch
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3  # Triton's own


# Attention ------------------------------------------------------------------------------------------------------------

WIDTHS = {"LLaDA-8B": (128, 1, 32), "Dream-7B": (128, 7, 4), "SDAR-8B": (128, 4, 8), "LLaDA2-mini": (128, 4, 4)}
GIVEN = [  # decoding, block-causal; without a cache; fresh keys before stored ones, and drafts; drafts without a cache
    ("stored",),
    ("stored", "split"),
    ("stored", "until", "split"),
    ("fresh",),
    ("fresh", "until"),
    ("stored", "fresh", "split"),
    ("stored", "fresh", "segment", "until", "split"),
    ("fresh", "segment", "until"),
]


def of_attention(
    name: str, dtype: str, size: int, group: int, kv_heads: int, queries: int, *given: str
) -> Configuration:
    """given: the optional arguments that this launch has, and what its integers are."""
    shape, warps, stages = attention.tile(queries, size, 4 if dtype == "fp32" else 2, "fresh" in given)
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
    kernel = flash.attention_kernel
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in kernel.arg_names}
    name = f"attention {name} {dtype} Dh={size} queries={shape['BLOCK_M']} {' '.join(given)}"
    return Configuration(name, kernel, signature, constants, warps, stages)


def of_combination(dtype: str, size: int, one: bool = False) -> Configuration:
    pointers = {"parts": "*fp32", "peaks": "*fp32", "totals": "*fp32", "out": f"*{dtype}"}
    constants = {"DH": size, "BLOCK_D": next_power_of_2(size), "LINES": attention.LINES} | ({"lines": 1} if one else {})
    signature = pointers | {"lines": "i32:16", "splits": "i32"} | dict.fromkeys(constants, "constexpr")
    name = f"attention combine {dtype} Dh={size}{' one line' if one else ''}"
    return Configuration(name, flash.combine_kernel, signature, constants)


ATTENTION = [
    *(
        of_attention(name, "bf16", *WIDTHS[name], queries, *given)
        for name in ("LLaDA-8B", "Dream-7B")
        for queries in (16, 128)
        for given in GIVEN
    ),
    *(
        of_attention("LLaDA-8B", "bf16", *WIDTHS["LLaDA-8B"], queries, *given, "one row")
        for queries, given in (
            *((queries, ("stored", "split")) for queries in (16, 32, 64, 128)),
            *((queries, ("fresh",)) for queries in (16, 32, 128)),
        )
    ),
    *(  # a few rows of 32 positions, hidden columns, and a number of entries that nothing divides
        of_attention("LLaDA-8B", "bf16", *WIDTHS["LLaDA-8B"], 32, "stored", "split", *given)
        for given in ((), ("unread", "one row"), ("any entries", "one row"))
    ),
    *(  # 16 or 64 rows of 32 positions; one row that is refreshed
        of_attention(name, "bf16", *model, queries * model[1], *given)
        for name, model in WIDTHS.items()
        for queries, given in (
            (32, ("stored", "16 rows")),
            (32, ("stored", "until", "16 rows")),
            (2048, ("stored", "one row")),
        )
    ),
    *(
        of_attention("heads", dtype, size, 4, 8, 32, *given)
        for dtype in ("bf16", "fp32")
        for size in (64, 80, 128)
        for given in (("stored", "split"), ("stored", "fresh", "segment", "until", "split"))
    ),
    *(of_combination(dtype, size) for dtype in ("bf16", "fp32") for size in (64, 80, 128)),
    of_combination("bf16", 128, one=True),
]

# Readout and head -----------------------------------------------------------------------------------------------------

TYPES = {
    "reals": "*fp32",
    "names": "*i32",
    **dict.fromkeys(("confidence", "margin", "gap", "entropy", "logsumexp", "current"), "*fp64"),
    **dict.fromkeys(("token", "keys", "named"), "*i64"),
    "temperature": "fp32",
    "rows": "i32:16",
    "stride": "i32",
}
ONE_ROW = {"rows": 1}  # a launch makes an integer that is 1 a constant


def sampling(vocab: int, what: str) -> Sampling:
    """The word "draw" asks for a draw at a temperature that is measured too."""
    draws = "draw" in what
    return Sampling(mask_id=vocab - 1, temperature=float(draws), measured=draws)


def absent(what: str) -> dict[str, Any]:
    """None for each argument that a configuration does not have; the words "draw" and "current" ask for them."""
    return ({} if "draw" in what else {"keys": None}) | ({} if "current" in what else {"named": None})


def of_logits(name: str, kernel: Any, dtype: str, constants: dict[str, Any], warps: int, stages: int) -> Configuration:
    """`constants` has None for an argument that is absent.

    The number of rows is a multiple of 16, unless the name says another.
    """
    own = dict.fromkeys(("logits", "hidden", "weight"), f"*{dtype}") | ({"rows": "i32"} if "any rows" in name else {})
    signature = {
        argument: "constexpr" if argument in constants else (TYPES | own)[argument] for argument in kernel.arg_names
    }
    return Configuration(name, kernel, signature, constants, warps, stages)


def of_parts(parts: int, draw: bool, one: bool) -> Configuration:
    name = f"combine {parts} parts{' draw' if draw else ''}{' one row' if one else ''}"
    constants = partial.finishing(parts, draw) | {"current": None} | (ONE_ROW if one else {})
    return of_logits(name, partial.combine_kernel, "bf16", constants, warps=4, stages=2)


def of_readout(dtype: str, vocab: int, what: str) -> Configuration:
    shape, warps = readout.tile(vocab, sampling(vocab, what), 4 if dtype == "fp32" else 2)
    shape |= absent(what) | (ONE_ROW if "one row" in what else {})
    return of_logits(f"readout {dtype} V={vocab} {what}", readout.readout_kernel, dtype, shape, warps, readout.STAGES)


def of_head(dtype: str, rows: int, vocab: int, width: int, what: str) -> Configuration:
    shape, warps = head.tile(rows, 4 if dtype == "fp32" else 2, what.startswith("draw"))
    shape |= {"D": width, "PARTS": cdiv(vocab, shape["BLOCK_V"])} | partial.constants(vocab, sampling(vocab, what))
    shape |= absent(what) | (ONE_ROW if rows == 1 else {})
    many = "one row" if rows == 1 else f"{rows} rows" if rows % 16 == 0 else "any rows"
    return of_logits(f"head {dtype} V={vocab} {many} {what}", head.head_kernel, dtype, shape, warps, head.STAGES)


READOUT = [
    *(of_readout("bf16", vocab, what) for vocab in (126464, 152064, 262144) for what in ("greedy", "draw")),
    of_readout("bf16", 126464, "greedy one row"),
    of_readout("bf16", 126464, "draw current"),
    of_readout("bf16", 126464, "draw any rows"),
    of_readout("fp16", 126464, "draw"),
    of_readout("fp32", 126464, "greedy"),
    of_readout("fp32", 262144, "draw current"),
    # The parts of the readout, and of the head.
    *(of_parts(parts, draw, False) for parts in (31, 38, 64, 988, 1188, 2048) for draw in (False, True)),
    of_parts(31, True, True),
]
HEAD = [
    *(
        of_head("bf16", rows, vocab, width, what)
        for vocab, width in ((126464, 4096), (152064, 3584), (262144, 4096))
        for rows in (16, 32, 64)
        for what in ("greedy", "draw")
    ),
    *(of_head("bf16", rows, 126464, 4096, "greedy") for rows in (1, 20)),
    of_head("bf16", 16, 126464, 4096, "draw current"),
    of_head("fp16", 16, 126464, 4096, "draw"),
    of_head("fp32", 16, 126464, 4096, "greedy"),
    of_head("fp32", 16, 126464, 4096, "draw"),
]

# The rest of a layer --------------------------------------------------------------------------------------------------


def of_linear(dtype: str, rows: int, outputs: int, inputs: int, bias: bool = False) -> Configuration:
    tile = linear.tile(rows, outputs, 4 if dtype == "fp32" else 2)
    constants: dict[str, Any] = {"OUTPUTS": outputs, "INPUTS": inputs, **tile, "WIDE": False}
    constants |= {} if bias else {"bias": None}
    types = {"x": f"*{dtype}", "weight": "*i8", "scale": "*fp32", "out": f"*{dtype}", "stride": "i32"}
    types |= {"rows": "i32" if rows % 16 else "i32:16"} | ({"bias": f"*{dtype}"} if bias else {})
    signature = {name: types.get(name, "constexpr") for name in linear.linear_kernel.arg_names}
    name = f"linear int8 {dtype} {outputs} x {inputs} {rows} rows"
    return Configuration(name, linear.linear_kernel, signature, constants, linear.WARPS, linear.STAGES)


def of_norm(dtype: str, width: int, add: bool, any_rows: bool = False) -> Configuration:
    block, rows, warps = norm.tile(width)
    extra = f"*{dtype}" if add else "constexpr"
    return Configuration(
        name=f"norm {dtype} D={width}{' add' if add else ''}{' any rows' if any_rows else ''}",
        kernel=norm.norm_kernel,
        signature={"hidden": f"*{dtype}", "delta": extra, "weight": f"*{dtype}", "normed": f"*{dtype}"}
        | {"residual": extra, "rows": "i32" if any_rows else "i32:16", "stride": "i32", "eps": "fp32"}
        | dict.fromkeys(("WIDTH", "BLOCK", "ROWS"), "constexpr"),
        constants={"WIDTH": width, "BLOCK": block, "ROWS": rows} | ({} if add else {"delta": None, "residual": None}),
        warps=warps,
    )


def of_rope(name: str, dtype: str, shape: dict[str, int], norms: bool, slots: bool) -> Configuration:
    pointer, optional = f"*{dtype}", {"q_weight": norms, "k_weight": norms}
    optional |= dict.fromkeys(("k", "v"), not slots) | dict.fromkeys(("keys", "values", "places"), slots)
    constants = shape | dict.fromkeys(argument for argument, given in optional.items() if not given)
    types = {"eps": "fp32", "cos": "*fp32", "sin": "*fp32", "places": "*i64"}
    signature = {a: "constexpr" if a in constants else types.get(a, pointer) for a in rope.qkv_kernel.arg_names}
    where = " slots" if slots else ""
    return Configuration(f"qkv_rope {name} {dtype}{where}", rope.qkv_kernel, signature, constants, rope.WARPS)


def of_swiglu(dtype: str) -> Configuration:
    signature = dict.fromkeys(("gate", "up", "out"), f"*{dtype}")
    signature |= dict.fromkeys(("width", "gate_stride", "up_stride"), "i32:16") | {"BLOCK": "constexpr"}
    name, constants = f"swiglu {dtype}", {"BLOCK": swiglu.BLOCK}
    return Configuration(name, swiglu.swiglu_kernel, signature, constants, swiglu.WARPS)


HEADS = {  # heads, of keys, width of a head, of it turned; norms
    "LLaDA-8B": (32, 32, 128, 128, False),
    "Dream-7B": (28, 4, 128, 128, False),
    "SDAR-8B": (32, 8, 128, 128, True),
    "LLaDA2-mini": (16, 4, 128, 64, True),
    "80 wide": (16, 4, 80, 80, False),
}
LAYER = [
    *(  # LLaDA-8B: queries, keys and values; output; gate and up; down
        of_linear("bf16", rows, outputs, inputs)
        for outputs, inputs in ((12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
        for rows in (16, 32)
    ),
    of_linear("bf16", 32, 4608, 3584, bias=True),  # Dream-7B
    of_linear("fp16", 32, 24576, 4096),
    of_linear("fp32", 32, 24576, 4096),
    *(
        of_norm(dtype, width, add)
        for dtype in ("bf16", "fp32")
        for width, add in ((128, False), (3584, True), (4096, True), (4096, False), (8192, True))
    ),
    of_norm("bf16", 4096, True, any_rows=True),
    *(
        of_rope(name, dtype, rope.tile(*model[:4], 4 if dtype == "fp32" else 2), *model[4:], slots)
        for name, model in HEADS.items()
        for dtype in ("bf16", "fp32")
        for slots in (False, True)
    ),
    *map(of_swiglu, ("bf16", "fp16", "fp32")),
]

CONFIGURATIONS = [*ATTENTION, *HEAD, *READOUT, *LAYER]
