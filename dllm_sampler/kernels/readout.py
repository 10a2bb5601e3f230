"""A kernel that reads logits once and returns token, confidence, margin, entropy and other statistics."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.partial import (
    BEYOND,
    LOW,
    constants,
    drawn,
    empty,
    finish,
    floor,
    gumbel,
    put,
    refine,
    room,
    weigh,
    words,
)
from dllm_sampler.kernels.sampling import GREEDY, Sampling
from dllm_sampler.kernels.sizes import cdiv

PART = 4096  # logits of a part: always the same, so that a row's sums do not depend on the batch
LOAD = 16  # bytes, neighbours, that a thread loads at once
WARPS = 2  # of a program that draws nothing
STAGES = 2
BLOCK = 512  # logits that a draw works on at once: 48 registers of a thread, where 1024 take 64 or spill


@triton.jit
def readout_kernel(
    logits, stride, rows, temperature, keys, named, reals, names,
    V: tl.constexpr, MASK: tl.constexpr, DRAW: tl.constexpr, MEASURED: tl.constexpr,
    PART: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Reduce one part of a row.

    A program loads the whole part before it computes anything, since bytes in flight keep memory busy. It finds the
    best logit first, so that no sum is rescaled. With more operations per logit, arithmetic would be the limit.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.cast(rows, tl.int64) * PARTS
    logits += row * stride
    begin = part * PART
    end = tl.minimum(begin + PART, V)
    zero = tl.zeros([1, 1], tl.float32)
    nothing = zero.to(tl.int32)

    # A thread's logits lie on the first and the last axis, so that most of a reduction needs no other thread.
    vector = tl.arange(0, PART // (LANES * PACK))[:, None, None] * (LANES * PACK)
    first = begin + vector + tl.arange(0, LANES)[None, :, None] * PACK
    name = first + tl.arange(0, PACK)[None, None, :]
    x = tl.load(logits + name, mask=name < V, other=-float("inf")).to(tl.float32)
    if MEASURED:
        x = tl.math.div_rn(x, temperature)
    if part == MASK // PART:
        x = tl.where(name == MASK, -float("inf"), x)
    # The best one: its value, the vector it lies in, its place there.
    most = tl.max(x, 2)
    top = _over(most, tl.max)
    first = tl.reshape(first, most.shape)
    origin = _over(tl.where(most == top, first, BEYOND), tl.min)
    few = origin + tl.arange(0, PACK)[None]  # no token, if the whole part is NaN
    raw = tl.load(logits + few, mask=(few >= begin) & (few < end), other=-float("inf"))
    near = refine(raw, few, temperature, V, MASK, MEASURED)  # [1, PACK]
    best_id = tl.min(tl.where(near == top, few, BEYOND), 1, keep_dims=True)
    near = tl.where(few == best_id, -float("inf"), near)
    # All others. Those in the best one's vector are summed apart: added to its 1, they would be rounded away.
    best = floor(top)
    apart = first != origin
    e, far = weigh(best[:, :, None] - x)
    e_near, far_near = weigh(best - near)
    rest = _over(tl.where(apart, tl.sum(e, 2), 0.0), tl.sum) + tl.sum(e_near, 1, keep_dims=True)
    spread = _over(tl.where(apart, tl.sum(e * far, 2), 0.0), tl.sum) + tl.sum(e_near * far_near, 1, keep_dims=True)
    second = _over(tl.where(apart, most, -float("inf")), tl.max)
    second = floor(tl.maximum(second, tl.max(near, 1, keep_dims=True)))

    chosen, chosen_id, chosen_logit = zero - float("inf"), nothing, zero + LOW
    if DRAW:
        low, high = words(keys, row + nothing, nothing == 0)
        score = tl.full([1, BLOCK], -float("inf"), tl.float32)
        score_id = tl.zeros([1, BLOCK], tl.int32)
        score_logit = tl.full([1, BLOCK], LOW, tl.float32)
        for start in range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)[None]
            given = tl.load(logits + ids, mask=ids < V, other=-float("inf"))
            seen = refine(given, ids, temperature, V, MASK, MEASURED)
            new = refine(given, ids, temperature, V, MASK, True) + gumbel(low, high, ids)
            wins = (new > score) & (seen > LOW)
            score = tl.where(wins, new, score)
            score_id = tl.where(wins, ids, score_id)
            score_logit = tl.where(wins, seen, score_logit)
        chosen, chosen_id, chosen_logit = drawn(score, score_id, score_logit)
    present = zero - float("inf")
    if named is not None:
        asked = tl.load(named + row + nothing)
        here = (asked >= begin) & (asked < end)
        wanted = tl.load(logits + asked, mask=here, other=-float("inf"))
        present = refine(wanted, asked, temperature, V, MASK, MEASURED)
    at = row * PARTS + part + nothing
    found = best, best_id, rest, spread, second, chosen, chosen_id, chosen_logit
    put(reals, names, at, nothing == 0, size, found, present)


@triton.jit
def _over(x, reduction: tl.constexpr):
    """Reduce `[m, n]` to `[1, 1]`, within each thread first."""
    return reduction(reduction(x, 0, keep_dims=True), 1, keep_dims=True)


def readout(logits: Tensor, sampling: Sampling = GREEDY) -> Readout:
    """Choose a token for each row and measure the model's confidence, in one pass over the logits.

    Args:
        logits: `[N, V]` bfloat16, float16 or float32, rows at any stride. They are not written.
        sampling: how to choose, and what to measure. By default the best token is chosen.

    Returns:
        `[N]` token, confidence, margin, gap, entropy, logsumexp, and current if `sampling` has it. A row with NaN, with
        +inf or without a finite logit is NaN in every statistic. Its token is in range and has no meaning. It is 0 if
        every logit is -inf or NaN.

    Raises:
        UserError: see `Sampling.check`.
    """
    rows, vocab = logits.shape
    sampling.check(logits, vocab)
    if not rows:
        return empty(rows, logits.device, sampling)
    shape, warps = tile(vocab, sampling, logits.element_size())
    parts = shape["PARTS"]
    buffers = room(rows, parts, logits.device)
    readout_kernel[(rows, parts)](
        logits,
        logits.stride(0),
        rows,
        float(sampling.temperature),
        sampling.keys if sampling.draws else None,
        sampling.current,
        *buffers,
        **shape,
        num_warps=warps,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    return finish(sampling, *buffers)


def tile(vocab: int, sampling: Sampling, size: int) -> tuple[dict[str, Any], int]:
    """Return the constants of the kernel for logits of `size` bytes, and its warps."""
    warps, pack = 8 if sampling.draws else WARPS, LOAD // size
    own = {"PART": PART, "LANES": min(64 * warps, PART // pack // 2), "PACK": pack, "BLOCK": BLOCK}
    return constants(vocab, sampling) | own | {"PARTS": cdiv(vocab, PART)}, warps
