"""From logits to token, confidence, margin, entropy and the like, reading the logits once."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.configuration import cdiv
from dllm_sampler.kernels.partial import (
    LOW,
    ONE_ROW,
    combine,
    configuration,
    finish,
    finishing,
    floor,
    former,
    gumbel,
    outputs,
    push,
    put,
    reduce,
    refine,
    room,
    sortable,
    words,
)
from dllm_sampler.kernels.statistics import Statistics, Then, check

PART = 4096  # logits of a part: always the same, so that a row's sums do not depend on the batch
BLOCK = 1024  # of which a program works on so many at once
MANY = 1024  # rows from which on one program does all parts of a row


@triton.jit
def readout_kernel(
    logits, stride, rows, temperature, keys, named, then_rows, then_stride, then_logsumexp, then_index,
    reals, names, lists,
    token, confidence, margin, gap, entropy, logsumexp, current, divergence, values, ids, top,
    V: tl.constexpr, MASK: tl.constexpr, DRAW: tl.constexpr, MEASURED: tl.constexpr,
    WHOLE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: one part of a row or, if WHOLE, all parts of it and their combination.

    A thread keeps statistics of the logits that it has seen; they meet at the end of a part.
    """
    row = tl.program_id(0).to(tl.int64)
    size = tl.cast(rows, tl.int64) * PARTS
    logits += row * stride
    one = tl.zeros([1, 1], tl.int64)
    always = one == 0
    dtype: tl.constexpr = logits.dtype.element_ty
    if DRAW:
        low, high = words(keys, row + one, always)
    if then_rows is not None:
        before = tl.load(then_index + row)
        then_rows += before * then_stride
        norm = tl.load(then_logsumexp + before).to(tl.float32)
    first, parts = (0, PARTS) if WHOLE else (tl.program_id(1), 1)
    for part in range(first, first + parts):
        lane = tl.arange(0, BLOCK)[None]
        best = tl.full([1, BLOCK], LOW, tl.float32)
        best_id = tl.zeros([1, BLOCK], tl.int32)
        rest = tl.zeros([1, BLOCK], tl.float32)
        spread = tl.zeros([1, BLOCK], tl.float32)
        second = tl.full([1, BLOCK], LOW, tl.float32)
        chosen = tl.full([1, BLOCK], -float("inf"), tl.float32)
        chosen_id = tl.zeros([1, BLOCK], tl.int32)
        chosen_logit = tl.full([1, BLOCK], LOW, tl.float32)
        cross = tl.zeros([1, BLOCK], tl.float32)
        if TOP:
            listed = tl.full([1, TOP], -0x8000000000000000, tl.int64)
        for start in range(part * PART, min(part * PART + PART, V), BLOCK):
            name = start + lane
            raw = tl.load(logits + name, mask=name < V, other=-float("inf"))
            seen = refine(raw, name, temperature, dtype, V, MASK, MEASURED)
            x = floor(seen)
            e = tl.exp(-tl.abs(x - best))
            rises = x > best
            mass = rest + 1.0
            # `best` moves by at most 200, beyond which e is 0
            moved = e * (spread + tl.minimum(x - best, 200.0) * mass)
            spread = tl.where(rises, moved, spread + e * (best - x))
            rest = tl.where(rises, mass * e, rest + e)
            if then_rows is not None:
                old = tl.load(then_rows + name, mask=name < V, other=-float("inf"))
                log = former(refine(old, name, temperature, dtype, V, MASK, MEASURED), norm)
                cross = tl.where(rises, cross * e + log, cross + e * log)
            second = tl.maximum(second, tl.minimum(x, best))
            best_id = tl.where(rises, name, best_id)
            best = tl.where(rises, x, best)
            if DRAW:
                score = refine(raw, name, temperature, dtype, V, MASK, True) + gumbel(low, high, name)
                wins = (score > chosen) & (x > LOW)
                chosen = tl.where(wins, score, chosen)
                chosen_id = tl.where(wins, name, chosen_id)
                chosen_logit = tl.where(wins, x, chosen_logit)
            if TOP:
                listed = push(listed, sortable(seen, name, V), TOP)
        present = tl.full([1, 1], -float("inf"), tl.float32)
        if named is not None:
            asked = tl.load(named + row + one)
            here = (asked >= part * PART) & (asked < part * PART + PART)
            raw = tl.load(logits + asked, mask=here, other=-float("inf"))
            present = refine(raw, asked, temperature, dtype, V, MASK, MEASURED)
        at = row * PARTS + part + one
        found = reduce(best, best_id, rest, spread, second, chosen, chosen_id, chosen_logit, cross)
        put(reals, names, at, always, size, found, present)
        if TOP:
            tl.store(lists + at * TOP + tl.arange(0, TOP)[None], listed)
    if WHOLE:
        tl.debug_barrier()  # the parts are written
        combine(row, size, reals, names, lists,
                token, confidence, margin, gap, entropy, logsumexp, current, divergence, values, ids, top,
                PARTS, LANES, DRAW, TOP, CHUNK)  # fmt: skip


def readout(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    temperature: float = 0.0,
    measured: bool = False,
    keys: Tensor | None = None,
    current: Tensor | None = None,
    then: Then | None = None,
    top: int = 0,
    out: Statistics | None = None,
) -> Statistics:
    """A token per row and how sure the model is, as `readout.read` finds them, in one pass over the logits.

    logits: `[N, V]` bfloat16, float16 or float32, rows at any stride; not written
    mask_id: a token that can neither be chosen nor has any mass; None: none is
    temperature: of the draw; 0: the best token, the lowest id among equals
    measured: statistics of the tempered distribution too (`guides.Temperature`)
    keys: `[N] int64`, `noise.key` of every row in the stream `TOKENS`; needed at a temperature
    current: `[N] int64` tokens whose log-probability is wanted
    then: the logits one forward before, for the divergence
    top: length of the list of the highest logits, at most `statistics.MOST`
    out: where to write; made if not given
    """
    rows, vocab = logits.shape
    check(logits, vocab, mask_id, temperature, keys, then, top)
    out = out or Statistics.empty(rows, logits.device, current is not None, then is not None, top)
    if not rows:
        return out
    # On AMD a barrier does not wait for what was stored to memory, as the combination in the same program would need.
    draw, whole = temperature > 0, rows >= MANY and torch.version.hip is None
    constants = _constants(vocab, mask_id, draw, measured and draw, whole, top)
    parts = constants["PARTS"]
    buffers = room(rows, parts, constants["TOP"], logits.device)
    readout_kernel[(rows,) if whole else (rows, parts)](
        logits,
        logits.stride(0),
        rows,
        float(temperature),
        keys if draw else None,
        current,
        *((None, 0, None, None) if then is None else (then.rows, then.rows.stride(0), then.logsumexp, then.index)),
        *buffers,
        *outputs(out),
        **constants,
        num_warps=_warps(draw, then is not None, top),
        num_stages=2,
        enable_fp_fusion=True,
    )
    if not whole:
        finish(rows, parts, draw, buffers, out)
    return out


def _warps(draw: bool, diverge: bool, top: int) -> int:
    return 8 if draw or diverge or top else 4  # as many registers as a thread may have


def _constants(vocab: int, mask_id: int | None, draw: bool, measured: bool, whole: bool, top: int) -> dict[str, Any]:
    parts = cdiv(vocab, PART)
    own = {"V": vocab, "MASK": -1 if mask_id is None else mask_id, "DRAW": draw, "MEASURED": measured, "WHOLE": whole}
    return own | {"PART": PART, "BLOCK": BLOCK} | finishing(parts, draw, top)


def _configuration(dtype: str, vocab: int, what: str) -> Any:
    draw, top, whole = "draw" in what, 8 if "top" in what else 0, "whole" in what
    absent = [] if draw else ["keys"]
    absent += [] if "current" in what else ["named", "current"]
    absent += [] if "KL" in what else ["then_rows", "then_stride", "then_logsumexp", "then_index", "divergence"]
    absent += [] if top else ["lists", "values", "ids"]
    constants = _constants(vocab, vocab - 1, draw, draw, whole, top) | dict.fromkeys(absent)
    constants |= ONE_ROW if "one row" in what else {}
    warps = _warps(draw, "KL" in what, top)
    return configuration(f"readout {dtype} V={vocab} {what}", readout_kernel, dtype, constants, warps)


CONFIGURATIONS = [
    *(_configuration("bf16", vocab, what) for vocab in (126464, 152064, 262144) for what in ("greedy", "draw")),
    _configuration("bf16", 126464, "greedy one row"),
    _configuration("bf16", 126464, "greedy whole"),
    _configuration("bf16", 126464, "greedy KL"),
    _configuration("bf16", 126464, "draw current KL top"),
    _configuration("fp16", 126464, "draw"),
    _configuration("fp32", 126464, "greedy"),
    _configuration("fp32", 262144, "draw current KL top whole"),
]
