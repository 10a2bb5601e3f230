"""The language model's head and the readout in one: statistics of logits that are never stored.

Worth most where the head is dear, at a vocabulary of 126464 and more: a tile of the weight is multiplied with the
selected rows and reduced on the spot; what goes to memory is ten numbers per row and tile.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.configuration import cdiv
from dllm_sampler.kernels.partial import (
    LOW,
    ONE_ROW,
    configuration,
    finish,
    finishing,
    floor,
    former,
    gumbel,
    put,
    reduce,
    refine,
    room,
    rounded,
    sortable,
    words,
)
from dllm_sampler.kernels.statistics import Statistics, Then, check


@triton.jit
def head_kernel(
    hidden, stride, weight, index, rows, temperature, keys, named,
    then_rows, then_stride, then_logsumexp, then_index, reals, names, lists,
    D: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, DRAW: tl.constexpr, MEASURED: tl.constexpr,
    PARTS: tl.constexpr, TOP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows and one part, BLOCK_V tokens. Rows run fastest, so that they share the weight."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    part = tl.program_id(1)
    inside = row < rows
    name = part * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    dtype: tl.constexpr = hidden.dtype.element_ty
    source = row if index is None else tl.load(index + row, mask=inside, other=0)
    d = tl.arange(0, BLOCK_D)
    token = weight + name.to(tl.int64) * D + d[:, None]  # [BLOCK_D, BLOCK_V]
    own = hidden + source * stride + d[None]  # [BLOCK_R, BLOCK_D]
    product = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    if then_rows is not None:
        before = tl.load(then_index + row, mask=inside, other=0)
        past = then_rows + before * then_stride + d[None]
        old = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in range(0, D, BLOCK_D):
        left = d < D - start
        w = tl.load(token + start, mask=left[:, None] & (name < V), other=0.0)
        h = tl.load(own + start, mask=inside & left[None], other=0.0)
        if WIDE:
            h, w = h.to(tl.float32), w.to(tl.float32)
        product = tl.dot(h, w, product, input_precision="ieee")
        if then_rows is not None:
            h = tl.load(past + start, mask=inside & left[None], other=0.0)
            if WIDE:
                h = h.to(tl.float32)
            old = tl.dot(h, w, old, input_precision="ieee")
    logits = rounded(product, dtype)
    seen = refine(logits, name, temperature, dtype, V, MASK, MEASURED)
    x = floor(seen)
    nothing = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    names_here = name + tl.zeros([BLOCK_R, BLOCK_V], tl.int32)
    score = nothing
    if DRAW:
        low, high = words(keys, row, inside)
        score = refine(logits, name, temperature, dtype, V, MASK, True) + gumbel(low, high, name)
        score = tl.where(x > LOW, score, -float("inf"))
    cross = nothing
    if then_rows is not None:
        norm = tl.load(then_logsumexp + before, mask=inside, other=0.0).to(tl.float32)
        old = refine(rounded(old, dtype), name, temperature, dtype, V, MASK, MEASURED)
        cross = former(old, norm)
    present = tl.full([BLOCK_R, 1], -float("inf"), tl.float32)
    if named is not None:
        asked = tl.load(named + row, mask=inside, other=-1)
        present = tl.max(tl.where(name == asked, seen, -float("inf")), 1, keep_dims=True)
    at = row * PARTS + part
    found = reduce(x, names_here, nothing, nothing, nothing + LOW, score, names_here, x, cross)
    put(reals, names, at, inside, tl.cast(rows, tl.int64) * PARTS, found, present)
    if TOP:
        place = tl.arange(0, TOP)[None]
        tl.store(lists + at * TOP + place, tl.topk(sortable(seen, names_here, V), TOP), mask=inside)


def head(
    hidden: Tensor,
    weight: Tensor,
    *,
    index: Tensor | None = None,
    mask_id: int | None = None,
    temperature: float = 0.0,
    measured: bool = False,
    keys: Tensor | None = None,
    current: Tensor | None = None,
    then: Then | None = None,
    top: int = 0,
    out: Statistics | None = None,
) -> Statistics:
    """What `readout` says of `hidden[index] @ weight.T`, without that product in memory.

    hidden: `[M, D]` bfloat16, float16 or float32, rows at any stride
    weight: `[V, D]` contiguous, in the same dtype
    index: `[N] int64` the rows that are asked about, such as the masks of a window; None: all
    then: the hidden states one forward before; their product shares the weight's way through memory
    keys, current, the indices of then: `[N]`; the other arguments as in `readout`

    Sums in float32 (never in TF32), then rounds to the weight's dtype as a stored product would be. Matrix units add
    in an order of their own, so that a logit may differ from the stored one by its last place.
    """
    rows = len(hidden) if index is None else len(index)
    vocab, width = weight.shape
    check(hidden, vocab, mask_id, temperature, keys, then, top)
    out = out or Statistics.empty(rows, hidden.device, current is not None, then is not None, top)
    if not rows:
        return out
    draw = temperature > 0
    shape, warps, stages = _shape(rows, hidden.dtype.itemsize, then is not None, top)
    constants = _constants(vocab, width, mask_id, draw, measured and draw, shape, top)
    parts = constants["PARTS"]
    buffers = room(rows, parts, constants["TOP"], hidden.device)
    head_kernel[cdiv(rows, shape["BLOCK_R"]), parts](
        hidden,
        hidden.stride(0),
        weight.contiguous(),
        index,
        rows,
        float(temperature),
        keys if draw else None,
        current,
        *((None, 0, None, None) if then is None else (then.rows, then.rows.stride(0), then.logsumexp, then.index)),
        *buffers,
        **constants,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )
    finish(rows, parts, draw, buffers, out)
    return out


def _shape(rows: int, size: int, diverge: bool, top: int) -> tuple[dict[str, int], int, int]:
    """Tile, warps and stages, for numbers of `size` bytes: within the 64 KB of shared memory that AMD's have.

    Registers decide how many programs a multiprocessor holds, and so how much of the weight is on its way: with up to
    32 rows three or four on an H100 (two that draw), each with two tiles of 16 KB.
    """
    lines = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tile = {"BLOCK_R": lines, "BLOCK_V": 64 if top or diverge else 128, "BLOCK_D": 64 if size == 2 else 32}
    return tile, 8 if lines == 64 else 4, 3


def _constants(
    vocab: int, width: int, mask_id: int | None, draw: bool, measured: bool, shape: dict[str, int], top: int
) -> dict[str, Any]:
    mask = -1 if mask_id is None else mask_id
    parts = cdiv(vocab, shape["BLOCK_V"])
    ends = finishing(parts, draw, top)
    own = {"D": width, "V": vocab, "MASK": mask, "DRAW": draw, "MEASURED": measured, **shape}
    own["WIDE"] = triton.knobs.runtime.interpret  # which multiplies matrices of bfloat16 by their bits
    return own | {name: ends[name] for name in ("PARTS", "TOP")}


def _configuration(dtype: str, rows: int, vocab: int, width: int, what: str) -> Any:
    draw, diverge, top = "draw" in what, "KL" in what, 8 if "top" in what else 0
    shape, warps, stages = _shape(rows, 4 if dtype == "fp32" else 2, diverge, top)
    absent = [] if draw else ["keys"]
    absent += [] if "current" in what else ["named"]
    absent += [] if diverge else ["then_rows", "then_stride", "then_logsumexp", "then_index"]
    absent += [] if top else ["lists"]
    constants = _constants(vocab, width, vocab - 1, draw, draw, shape, top) | dict.fromkeys(absent)
    constants |= ONE_ROW if rows == 1 else {}
    many = "one row" if rows == 1 else f"{rows} rows"
    return configuration(f"head {dtype} V={vocab} {many} {what}", head_kernel, dtype, constants, warps, stages)


CONFIGURATIONS = [
    *(
        _configuration("bf16", rows, vocab, width, what)
        for vocab, width in ((126464, 4096), (152064, 3584), (262144, 4096))
        for rows, what in ((16, "greedy"), (32, "greedy"), (32, "draw"), (64, "greedy"), (64, "draw"))
    ),
    _configuration("bf16", 1, 126464, 4096, "greedy"),
    _configuration("bf16", 16, 126464, 4096, "draw current KL"),
    _configuration("bf16", 64, 126464, 4096, "greedy KL"),
    _configuration("bf16", 64, 126464, 4096, "greedy top"),
    _configuration("fp16", 16, 126464, 4096, "draw"),
    _configuration("fp32", 16, 126464, 4096, "greedy"),
    _configuration("fp32", 64, 126464, 4096, "draw"),
]
