"""The language model's head and the readout in one: statistics of logits that are never stored.

A program multiplies a tile of the weight with the selected rows, reduces the product in registers and writes nine
numbers per row and tile. It saves most at vocabularies of 126464 tokens and more.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.configuration import Stages, cdiv
from dllm_sampler.kernels.partial import (
    BEYOND,
    INTERPRETED,
    LOW,
    ONE_ROW,
    absent,
    configuration,
    constants,
    described,
    drawn,
    empty,
    finish,
    floor,
    noises,
    put,
    reduce,
    refine,
    room,
    rounded,
    weigh,
    words,
)
from dllm_sampler.kernels.sampling import GREEDY, Sampling

GROUP = 16  # tiles of rows that share each tile of the weight: 16 MB of rows 4096 wide, within an L2 cache of 40 MB


@triton.jit
def head_kernel(
    hidden, stride, weight, index, rows, temperature, keys, named, reals, names,
    D: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, DRAW: tl.constexpr, MEASURED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows and one part, BLOCK_V tokens. In a group rows run fastest, then parts."""
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if tile * BLOCK_R >= rows:  # the last group may have fewer
        return
    row = tile.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    part = tl.program_id(1)
    inside = row < rows
    name = part * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    dtype: tl.constexpr = hidden.dtype.element_ty
    source = row if index is None else tl.load(index + row, mask=inside, other=0)
    d = tl.arange(0, BLOCK_D)
    token = weight + name.to(tl.int64) * D + d[:, None]  # [BLOCK_D, BLOCK_V]
    own = hidden + source * stride + d[None]  # [BLOCK_R, BLOCK_D]
    product = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in range(0, D, BLOCK_D):
        left = d < D - start
        w = tl.load(token + start, mask=left[:, None] & (name < V), other=0.0)
        h = tl.load(own + start, mask=inside & left[None], other=0.0)
        if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 numbers
            h, w = h.to(tl.float32), w.to(tl.float32)
        product = tl.dot(h, w, product, input_precision="ieee")
    logits = rounded(product, dtype).to(dtype)  # takes half the registers, except in float32
    low, high, asked = None, None, None
    if DRAW:
        low, high = words(keys, row, inside)
    if named is not None:
        asked = tl.load(named + row, mask=inside, other=-1).to(tl.int32)  # int64 would take registers
    if BLOCK_R <= 64:
        found, present = _part(logits, name, temperature, low, high, asked, V, MASK, MEASURED)
    else:  # piece by piece in a loop, which takes fewer registers
        size: tl.constexpr = 32 if DRAW else BLOCK_V // 2  # noise takes more of them
        held, first = _packed(logits), part * BLOCK_V + 2 * tl.arange(0, size)[None]
        none = tl.zeros([BLOCK_R, 1], tl.float32)
        rest, spread, present, score = none, none, none - float("inf"), none - float("inf")
        best, second, chosen, best_id = none + LOW, none + LOW, none + LOW, none.to(tl.int32) + BEYOND
        chosen_id = best_id
        for turn in tl.range(0, BLOCK_V // size, loop_unroll_factor=1 if DRAW else 2):
            piece, its = _piece(held, turn, size, dtype), first + turn // 2 * (2 * size) + turn % 2
            one, also = _part(piece, its, temperature, low, high, asked, V, MASK, MEASURED)
            if named is not None:
                present = tl.maximum(present, also)
            best, best_id, rest, spread, second, score, chosen_id, chosen = reduce(
                _pair(best, one[0]), _pair(best_id, one[1]), _pair(rest, one[2]), _pair(spread, one[3]),
                _pair(second, one[4]), _pair(score, one[5]), _pair(chosen_id, one[6]), _pair(chosen, one[7]),
            )  # fmt: skip
        found = (best, best_id, rest, spread, second, score, chosen_id, chosen)
    at = row * PARTS + part
    put(reals, names, at, inside, tl.cast(rows, tl.int64) * PARTS, found, present)


@triton.jit
def _part(
    logits, name, temperature, low, high, asked,
    V: tl.constexpr, MASK: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Reduce logits `[R, n]` of tokens `name [1, n]` to a part like `reduce`; and the logits of the named tokens."""
    x = refine(logits, name, temperature, V, MASK, MEASURED)
    names = name + tl.zeros(x.shape, tl.int32)
    highest = tl.max(x, 1, keep_dims=True)
    best_id = tl.min(tl.where(x == highest, names, BEYOND), 1, keep_dims=True)
    best = floor(highest)
    others = tl.where(names == best_id, -float("inf"), x)
    second = floor(tl.max(others, 1, keep_dims=True))
    weight, far = weigh(best - others)
    rest, spread = tl.sum(weight, 1, keep_dims=True), tl.sum(weight * far, 1, keep_dims=True)
    score, chosen_id, chosen = best, best_id, best
    if low is not None:
        noisy = refine(logits, name, temperature, V, MASK, True) + noises(low, high, names)
        score, chosen_id, chosen = drawn(tl.where(x > LOW, noisy, -float("inf")), names, x)
    present = highest
    if asked is not None:
        present = tl.max(tl.where(names == asked, x, -float("inf")), 1, keep_dims=True)
    return (best, best_id, rest, spread, second, score, chosen_id, chosen), present


@triton.jit
def _packed(x):
    """Pack `[R, n]` 16-bit numbers in pairs, `[R, n/2] int32`: neighbours lie in one thread, so nothing moves."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    even, odd = even.to(tl.int16, bitcast=True).to(tl.int32), odd.to(tl.int16, bitcast=True).to(tl.int32)
    return (odd << 16) | (even & 0xFFFF)


@triton.jit
def _piece(held, turn, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Unpack piece `turn`, `[R, SIZE]`: the even ones of the first 2 SIZE numbers, then their odd ones, and so on."""
    parts: tl.constexpr = held.shape[1] // SIZE
    if parts > 1:
        here = tl.arange(0, parts)[None, :, None] == turn // 2
        held = tl.sum(tl.where(here, tl.reshape(held, [held.shape[0], parts, SIZE]), 0), 1)
    high = held << (16 - turn % 2 * 16)
    if tl.bfloat16 == DTYPE:  # the upper half of a float32
        piece = (high & -0x10000).to(tl.float32, bitcast=True)
    else:
        piece = (high >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return piece


@triton.jit
def _pair(x, y):
    """Join two `[R, 1]` to `[R, 2]`."""
    return tl.reshape(tl.join(x, y), [x.shape[0], 2])


def head(hidden: Tensor, weight: Tensor, sampling: Sampling = GREEDY, *, index: Tensor | None = None) -> Readout:
    """`readout` of the logits `hidden[index] @ weight.T`, which are not stored.

    hidden: `[M, D]` bfloat16, float16 or float32, rows at any stride
    weight: `[V, D]` contiguous, in the same dtype
    sampling: as in `readout`
    index: `[N] int64` the rows that are asked about, such as the masks of a window; None: all

    Sums in float32 (never in TF32), then rounds to the weight's dtype as a stored product would be. Matrix units add
    in an order of their own, so that a logit may differ from the stored one by its last place. Tile and part depend on
    the number of rows (up to 16, 32, 64, more), and so do the order of sums and their last places; nothing else does.
    """
    rows = len(hidden) if index is None else len(index)
    vocab, width = weight.shape
    sampling.check(hidden, vocab)
    if not rows:
        return empty(rows, hidden.device, sampling)
    shape, warps, stages = _shape(rows, hidden.dtype.itemsize)
    parts = cdiv(vocab, shape["BLOCK_V"])
    buffers = room(rows, parts, hidden.device)
    shared = 0 if hidden.device.index is None else max_shared_mem(hidden.device.index)  # no GPU: it does not matter
    tiles = cdiv(rows, shape["BLOCK_R"])
    groups = cdiv(tiles, GROUP)
    head_kernel[cdiv(tiles, groups), parts, groups](
        hidden,
        hidden.stride(0),
        weight.contiguous(),
        index,
        rows,
        float(sampling.temperature),
        sampling.keys if sampling.draws else None,
        sampling.current,
        *buffers,
        **constants(vocab, sampling),
        **shape,
        D=width,
        PARTS=parts,
        num_warps=warps,
        num_stages=stages(shared),
        enable_fp_fusion=True,
    )
    return finish(sampling, *buffers)


def _shape(rows: int, size: int) -> tuple[dict[str, int], int, Stages]:
    """Tile, warps and stages, for numbers of `size` bytes.

    Up to 64 rows the weight's way through memory is the limit: registers decide how many programs a multiprocessor
    holds, and so how much of the weight is on its way. With up to 32 rows four and more on an H100 (three or four that
    draw), each with two tiles of 16 KB. With more, arithmetic is the limit, and what a tile reads for it: the largest
    tile whose sums the registers of one program hold does 85 operations for each byte that it reads, one of 64 x 128
    half as many. Float32, which no matrix unit multiplies here, keeps the smaller tile.
    """
    lines = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or size == 4 else 128
    columns = 128 if lines < 128 else 256
    tile = {"BLOCK_R": lines, "BLOCK_V": columns, "BLOCK_D": 128 // size}
    read = (lines + columns) * tile["BLOCK_D"] * size

    def stages(shared: int) -> int:  # as many as fit, of which the last needs no place on all but newer GPUs
        return max(2, min(3 if lines < 128 else 4, shared // read + 1))

    return tile, 8 if lines >= 64 or size == 4 else 4, stages


def _configuration(dtype: str, rows: int, vocab: int, width: int, what: str) -> Any:
    shape, warps, stages = _shape(rows, 4 if dtype == "fp32" else 2)
    shape |= {"D": width, "PARTS": cdiv(vocab, shape["BLOCK_V"])} | constants(vocab, described(vocab, what))
    shape |= absent(what) | (ONE_ROW if rows == 1 else {})
    many = "one row" if rows == 1 else f"{rows} rows"
    name = f"head {dtype} V={vocab} {many} {what}"
    return configuration(name, head_kernel, dtype, shape, warps, stages, aligned=rows == 2048)


CONFIGURATIONS = [
    *(
        _configuration("bf16", rows, vocab, width, what)
        for vocab, width in ((126464, 4096), (152064, 3584), (262144, 4096))
        for rows, what in (
            (16, "greedy"),
            *((rows, what) for rows in (32, 64, 1024) for what in ("greedy", "draw")),
        )
    ),
    _configuration("bf16", 1, 126464, 4096, "greedy"),
    *(_configuration("bf16", 2048, 126464, 4096, what) for what in ("greedy", "draw")),  # 64 rows of 32 positions
    *(_configuration("bf16", rows, 126464, 4096, "draw current") for rows in (16, 1024)),
    _configuration("fp16", 16, 126464, 4096, "draw"),
    _configuration("fp16", 1024, 126464, 4096, "draw"),
    _configuration("fp32", 16, 126464, 4096, "greedy"),
    _configuration("fp32", 64, 126464, 4096, "draw"),
]
