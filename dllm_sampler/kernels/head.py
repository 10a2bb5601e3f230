"""The language model's head and the readout in one: statistics of logits that are not stored.

A program multiplies a tile of the weight with the selected rows, reduces the product in registers and writes nine
numbers per row and tile. With more than `MOST` rows a library multiplies, and `readout` reads the stored product.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from dataclasses import fields, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.partial import (
    BEYOND,
    INTERPRETED,
    LOW,
    constants,
    drawn,
    empty,
    finish,
    floor,
    noises,
    put,
    refine,
    room,
    rounded,
    weigh,
    words,
)
from dllm_sampler.kernels.readout import readout
from dllm_sampler.kernels.sampling import GREEDY, Sampling
from dllm_sampler.kernels.sizes import cdiv

MOST = 64  # rows, in one tile (16 of float32); with more a library multiplies, which is better at arithmetic
STAGES = 3  # the last one needs no place on all but newer GPUs
AT_ONCE = 2048  # rows whose logits are stored at once: 0.5 GB of 126464 tokens in bfloat16


@triton.jit
def head_kernel(
    hidden, stride, weight, rows, temperature, keys, named, reals, names,
    D: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, DRAW: tl.constexpr, MEASURED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Reduce the logits of all rows at one part of BLOCK_V tokens."""
    row = tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    part = tl.program_id(0)
    inside = row < rows
    name = part * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    dtype: tl.constexpr = hidden.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    token = weight + name.to(tl.int64) * D + d[:, None]  # [BLOCK_D, BLOCK_V]
    own = hidden + row * stride + d[None]  # [BLOCK_R, BLOCK_D]
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
    found, present = _part(logits, name, temperature, low, high, asked, V, MASK, MEASURED)
    at = row * PARTS + part
    put(reals, names, at, inside, tl.cast(rows, tl.int64) * PARTS, found, present)


@triton.jit
def _part(
    logits, name, temperature, low, high, asked,
    V: tl.constexpr, MASK: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Return the part of logits `[R, n]` of tokens `name [1, n]`, as `reduce` does, and logits of tokens `asked`."""
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


def head(hidden: Tensor, weight: Tensor, sampling: Sampling = GREEDY) -> Readout:
    """Return `readout` of the logits `hidden @ weight.T`, which are not stored.

    The product is summed in float32 (never in TF32), then rounded to the weight's dtype as a stored one would be.
    Matrix units add in an order of their own, so a logit may differ from the stored one in its last place. The order
    depends on the number of rows only (up to 16, 32, `MOST`, more).

    Args:
        hidden: `[N, D]` bfloat16, float16 or float32, rows at any stride.
        weight: `[V, D]` contiguous, in the same dtype.
        sampling: as in `readout`.
    """
    rows, (vocab, width) = len(hidden), weight.shape
    sampling.check(hidden, vocab)
    if not rows:
        return empty(rows, hidden.device, sampling)
    if rows > (MOST if hidden.dtype.itemsize == 2 else MOST // 4):
        return _stored(hidden, weight, sampling)
    shape, warps = tile(rows, hidden.dtype.itemsize, sampling.draws)
    parts = cdiv(vocab, shape["BLOCK_V"])
    buffers = room(rows, parts, hidden.device)
    head_kernel[(parts,)](
        hidden,
        hidden.stride(0),
        weight.contiguous(),
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
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    return finish(sampling, *buffers)


def _stored(hidden: Tensor, weight: Tensor, sampling: Sampling) -> Readout:
    """Return `head` by a product that a library computes and stores, `AT_ONCE` rows at a time."""
    found = []
    for start in range(0, len(hidden), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        keys, current = (None if one is None else one[rows] for one in (sampling.keys, sampling.current))
        logits = F.linear(hidden[rows], weight)
        found.append(readout(logits, replace(sampling, keys=keys, current=current)))
    if len(found) == 1:
        return found[0]
    values = {one.name: [getattr(part, one.name) for part in found] for one in fields(Readout)}
    return Readout(**{name: None if parts[0] is None else torch.cat(parts) for name, parts in values.items()})


def tile(rows: int, size: int, draws: bool) -> tuple[dict[str, int], int]:
    """Return tile and warps for numbers of `size` bytes, and for a choice that draws or not.

    Reading the weight is the limit. Registers decide how many programs a multiprocessor holds, and so how many bytes
    are in flight. With up to 32 rows an H100 holds four or more (three or four that draw), each with two tiles of
    16 KB. With more rows it holds three. There a greedy choice with eight warps would spill on a B200, and a draw with
    four warps on every GPU.
    """
    lines = 16 if rows <= 16 else 32 if rows <= 32 else MOST
    warps = 8 if size == 4 or (draws and lines == MOST) else 4
    return {"BLOCK_R": lines, "BLOCK_V": 128, "BLOCK_D": 128 // size}, warps
