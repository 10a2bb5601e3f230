"""Choosing positions; and a step's whole commit in one launch: choosing, vouching, writing the canvas."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.arguments import flags, lined
from dllm_sampler.kernels.configuration import Configuration, cdiv, next_power_of_2
from dllm_sampler.kernels.rows import failures, noise_at
from dllm_sampler.kernels.statistics import check_rule

PAIRS = 4096  # of positions that are compared at once
COLUMNS = 1024  # that a program writes


@triton.jit
def _sortable(score, LEAST: tl.constexpr):
    """int64 that sort as `select.rank` sorts scores: NaN first, 0 and -0 alike, -inf like the least finite one."""
    x = score.to(tl.float64)
    least = tl.full([1], LEAST, tl.float64)
    x = tl.where(x < least, least, x)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int64, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _may(eligible, masked, positions, first, last, lane, there):
    """Which of the lanes are eligible: those that a table says, without one noise inside the block."""
    if eligible is not None:
        may = there & (tl.load(eligible + lane, mask=there, other=0) != 0)
    else:
        may = noise_at(masked, first, last, tl.load(positions + lane, mask=there, other=0), there)
    return may


@triton.jit
def _chosen(
    score, wanted, count, eligible, masked, positions, first, last, lane, width,
    THRESHOLD: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Which of the lanes the rule takes. Every pointer is to what belongs to the row."""
    inside = lane < width
    may = _may(eligible, masked, positions, first, last, lane, inside)
    own = tl.load(score + lane, mask=inside, other=-float("inf"))
    if count is None:
        # As `select.at_least_one`: a NaN among the candidates leaves the row without a leader.
        best = tl.max(tl.where(may & (own == own), own, -float("inf")))
        spoilt = tl.max((may & (own != own)).to(tl.int32))
        leader = tl.min(tl.where(may & (own == best), lane, BLOCK)) + spoilt * BLOCK
        if wanted is None:
            sure = own >= tl.full([1], THRESHOLD, own.dtype)
        else:
            sure = tl.load(wanted + lane, mask=inside, other=0) != 0
        chosen = may & (sure | (lane == leader))
    else:
        mine = _sortable(own, LEAST)
        rank = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, STEP):
            other = start + tl.arange(0, STEP)
            there = other < width
            rival = _may(eligible, masked, positions, first, last, other, there)
            theirs = _sortable(tl.load(score + other, mask=there, other=0.0), LEAST)
            ahead = (theirs[None] > mine[:, None]) | ((theirs[None] == mine[:, None]) & (other[None] < lane[:, None]))
            rank += tl.sum((ahead & rival[None]).to(tl.int32), 1)
        chosen = may & (rank < tl.load(count))
    return chosen


@triton.jit
def choose_kernel(
    score, eligible, wanted, count, chosen, score_stride, eligible_stride, wanted_stride, width,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if wanted is not None:
        wanted += row * wanted_stride
    if count is not None:
        count += row
    taken = _chosen(
        score + row * score_stride, wanted, count, eligible + row * eligible_stride, None, None, None, None, lane,
        width, None, LEAST, BLOCK, STEP,
    )  # fmt: skip
    tl.store(chosen + row * width + lane, taken.to(tl.uint8), mask=lane < width)


@triton.jit
def commit_kernel(
    ids, masked, frozen, positions, start, stop, done, step, bad, confidence, token, score, wanted, count, among,
    now, committed, new_ids, new_masked,
    ids_stride, masked_stride, frozen_stride, position_stride, confidence_stride, candidate_stride, token_stride,
    score_stride, wanted_stride, among_stride, candidates, columns, width,
    THRESHOLD: tl.constexpr, FORBIDDEN: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """One program: WRITTEN columns of a row, which it copies before it writes to them. Each makes the row's choice."""
    row, low = tl.program_id(0).to(tl.int64), tl.program_id(1) * WRITTEN
    masked += row * masked_stride
    positions += row * position_stride
    if wanted is not None:
        wanted += row * wanted_stride
    if count is not None:
        count += row
    if among is not None:
        among += row * among_stride
    column = low + tl.arange(0, WRITTEN)
    there = column < columns
    tl.store(new_ids + row * columns + column, tl.load(ids + row * ids_stride + column, mask=there), mask=there)
    tl.store(new_masked + row * columns + column, tl.load(masked + column, mask=there), mask=there)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    first, last, live = tl.load(start + row), tl.load(stop + row), tl.load(done + row + lane * 0) == 0
    at = tl.load(positions + lane, mask=inside, other=0)
    asked = live & noise_at(masked, first, last, at, inside)
    confidence += row * confidence_stride
    fails = tl.max(failures(confidence, candidate_stride, candidates, lane, asked, BLOCK), 0)
    before = tl.load(bad + row)
    found = tl.where((before == 0) & (fails > 0), tl.load(step + row) + 1, before)
    taken = _chosen(
        score + row * score_stride, wanted, count, among, masked, positions, first, last, lane,
        width, THRESHOLD, LEAST, BLOCK, STEP,
    ) & (found + lane * 0 == 0)  # fmt: skip
    new = tl.load(token + row * token_stride + lane, mask=taken, other=0)
    if FORBIDDEN is not None:
        taken = taken & (new != FORBIDDEN)
    leads = low == 0  # the others know it too
    tl.store(now + row, found, mask=leads)
    tl.store(committed + row * width + lane, taken.to(tl.uint8), mask=inside & leads)
    tl.debug_barrier()  # other threads of the program copied to the same places
    taken = taken & live & (at >= low) & (at < low + WRITTEN)
    taken = taken & (tl.load(frozen + row * frozen_stride + at, mask=taken, other=1) == 0)
    tl.store(new_ids + row * columns + at, new, mask=taken)
    tl.store(new_masked + row * columns + at, tl.zeros([BLOCK], tl.uint8), mask=taken)


def choose(score: Tensor, eligible: Tensor, *, wanted: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """`[B, Q] bool` what to commit, nothing written.

    score: `[B, Q]` float64 or float32, higher first: confidence, margin, negative entropy
    eligible: `[B, Q] bool` noise inside the block
    wanted: `[B, Q] bool` commit these, and the best eligible position in any case: `select.at_least_one`
    count: `[B] int64` commit so many of the best, the lower position first among equals: `select.top`
    """
    check_rule(wanted, count)
    batch, width = score.shape
    chosen = torch.empty(batch, width, dtype=torch.bool, device=score.device)
    if not chosen.numel():
        return chosen
    score, eligible = lined(score), lined(eligible)
    wanted, count = None if wanted is None else lined(wanted), None if count is None else count.contiguous()
    choose_kernel[batch,](
        *flags(score, eligible, wanted, count, chosen),
        score.stride(0), eligible.stride(0), 0 if wanted is None else wanted.stride(0), width,
        LEAST=torch.finfo(score.dtype).min, **_options(width),
    )  # fmt: skip
    return chosen


def commit(
    ids: Tensor,
    masked: Tensor,
    frozen: Tensor,
    positions: Tensor,
    start: Tensor,
    stop: Tensor,
    done: Tensor,
    step: Tensor,
    bad: Tensor,
    confidence: Tensor,
    token: Tensor,
    score: Tensor,
    threshold: float | None = None,
    wanted: Tensor | None = None,
    count: Tensor | None = None,
    among: Tensor | None = None,
    forbidden: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `bookkeeping.commit`; `score` is float64 or float32."""
    (batch, columns), width = ids.shape, positions.shape[1]
    now = torch.empty(batch, dtype=bad.dtype, device=bad.device)
    committed = torch.empty(batch, width, dtype=torch.bool, device=bad.device)
    new_ids = torch.empty(batch, columns, dtype=ids.dtype, device=ids.device)
    new_masked = torch.empty(batch, columns, dtype=torch.bool, device=ids.device)
    ids, masked, frozen, positions = map(lined, (ids, masked, frozen, positions))
    confidence, token, score = map(lined, (confidence, token, score))
    wanted, among = (None if one is None else lined(one) for one in (wanted, among))
    count = None if count is None else count.contiguous()
    of_rows = (one.contiguous() for one in (start, stop, done, step, bad))
    commit_kernel[batch, cdiv(columns, COLUMNS)](
        *flags(
            ids, masked, frozen, positions, *of_rows, confidence, token, score, wanted, count, among,
            now, committed, new_ids, new_masked,
        ),
        *(table.stride(0) for table in (ids, masked, frozen, positions)),
        confidence.stride(0), confidence.stride(1), token.stride(0), score.stride(0),
        *(0 if one is None else one.stride(0) for one in (wanted, among)), confidence.shape[1], columns, width,
        THRESHOLD=None if threshold is None else float(threshold), FORBIDDEN=forbidden,
        LEAST=torch.finfo(score.dtype).min, WRITTEN=COLUMNS, **_options(width),
    )  # fmt: skip
    return now, committed, new_ids, new_masked


def _options(width: int) -> dict[str, Any]:
    return _shape(width) | {"num_warps": _warps(width), "num_stages": 2, "enable_fp_fusion": True}


def _shape(width: int) -> dict[str, int]:
    block = max(2, next_power_of_2(width))
    return {"BLOCK": block, "STEP": max(2, min(block, PAIRS // block))}


def _warps(width: int) -> int:
    return 4 if width <= 256 else 8


def _configuration(kernel: Any, dtype: str, width: int, rule: str, **constants: Any) -> Configuration:
    rules = {"threshold": "THRESHOLD", "wanted": "wanted", "count": "count"}
    constants |= {rules[other]: None for other in rules if other != rule}
    least = torch.finfo(torch.float64 if dtype == "fp64" else torch.float32).min
    constants |= {"LEAST": least, "WRITTEN": COLUMNS, **_shape(width)}
    types = {"score": f"*{dtype}", "confidence": "*fp64"} | dict.fromkeys(("candidates", "columns", "width"), "i32")
    flagged = ("masked", "frozen", "done", "eligible", "wanted", "among", "chosen", "committed", "new_masked")
    types |= dict.fromkeys(flagged, "*u8")
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "i64" if argument.endswith("stride") else "*i64")
        for argument in kernel.arg_names
    }
    name = f"{kernel.fn.__name__.removesuffix('_kernel')} {rule} {dtype} Q={width}"
    constants = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    return Configuration(name, kernel, signature, constants, _warps(width))


CONFIGURATIONS = [
    *(
        _configuration(commit_kernel, dtype, width, rule, THRESHOLD=0.9, FORBIDDEN=None, **among)
        for dtype, width in (("fp64", 32), ("fp64", 512), ("fp32", 32))
        for rule, among in (("threshold", {"among": None}), ("wanted", {}), ("count", {}))
    ),
    *(
        _configuration(choose_kernel, dtype, width, rule)
        for dtype, width in (("fp64", 32), ("fp64", 512), ("fp32", 32))
        for rule in ("wanted", "count")
    ),
]
