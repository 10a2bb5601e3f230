"""Choosing positions and writing their tokens into the canvas, in one launch."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.configuration import Configuration, next_power_of_2
from dllm_sampler.kernels.statistics import check_rule

PAIRS = 4096  # of positions that are compared at once


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
def commit_kernel(
    ids, masked, positions, token, score, eligible, done, count, committed,
    ids_stride, masked_stride, position_stride, token_stride, score_stride, eligible_stride, width,
    THRESHOLD: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: one row of the batch, all its queried positions."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    live = tl.load(done + row + lane * 0) == 0
    may = inside & live & (tl.load(eligible + row * eligible_stride + lane, mask=inside, other=0) != 0)
    own = tl.load(score + row * score_stride + lane, mask=inside, other=-float("inf"))
    if count is None:
        # As `select.at_least_one`: a NaN among the candidates leaves the row without a leader.
        best = tl.max(tl.where(may & (own == own), own, -float("inf")))
        spoilt = tl.max((may & (own != own)).to(tl.int32))
        leader = tl.min(tl.where(may & (own == best), lane, BLOCK)) + spoilt * BLOCK
        chosen = may & ((own >= tl.full([1], THRESHOLD, own.dtype)) | (lane == leader))
    else:
        mine = _sortable(own, LEAST)
        rank = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, STEP):
            other = start + tl.arange(0, STEP)
            there = other < width
            rival = there & (tl.load(eligible + row * eligible_stride + other, mask=there, other=0) != 0)
            theirs = _sortable(tl.load(score + row * score_stride + other, mask=there, other=0.0), LEAST)
            ahead = (theirs[None] > mine[:, None]) | ((theirs[None] == mine[:, None]) & (other[None] < lane[:, None]))
            rank += tl.sum((ahead & rival[None]).to(tl.int32), 1)
        chosen = may & (rank < tl.load(count + row))
    column = tl.load(positions + row * position_stride + lane, mask=inside, other=0)
    new = tl.load(token + row * token_stride + lane, mask=inside, other=0)
    tl.store(ids + row * ids_stride + column, new, mask=chosen)
    tl.store(masked + row * masked_stride + column, tl.zeros([BLOCK], tl.uint8), mask=chosen)
    tl.store(committed + row * width + lane, chosen.to(tl.uint8), mask=inside)


def commit(
    ids: Tensor,
    masked: Tensor,
    positions: Tensor,
    token: Tensor,
    score: Tensor,
    eligible: Tensor,
    done: Tensor,
    *,
    threshold: float | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Choose positions and write them: `[B, Q] bool` what was committed. Rows that are done stay as they are.

    ids, masked: `[B, L+1] int64`, `bool`, of a canvas; written in place
    positions, token: `[B, Q] int64`
    score: `[B, Q]` float64 or float32, higher first: confidence, margin, negative entropy
    eligible: `[B, Q] bool` noise inside the block; never true at the empty slot
    done: `[B] bool`
    threshold: commit what reaches it, and the best eligible position in any case: `select.at_least_one`
    count: `[B] int64` commit so many of the best, the lower position first among equals: `select.top`
    """
    check_rule(threshold, count)
    batch, width = score.shape
    committed = torch.zeros(batch, width, dtype=torch.bool, device=score.device)
    if not committed.numel():
        return committed
    constants, warps = _shape(width)
    tables = [table if table.stride(1) == 1 else table.contiguous() for table in (positions, token, score, eligible)]
    commit_kernel[(batch,)](
        ids,
        _bytes(masked),
        *tables[:3],
        _bytes(tables[3]),
        _bytes(done.contiguous()),
        None if count is None else count.contiguous(),
        _bytes(committed),
        ids.stride(0),
        masked.stride(0),
        *(table.stride(0) for table in tables),
        width,
        THRESHOLD=threshold,
        LEAST=torch.finfo(score.dtype).min,
        **constants,
        num_warps=warps,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return committed


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


def _shape(width: int) -> tuple[dict[str, int], int]:
    block = max(2, next_power_of_2(width))
    return {"BLOCK": block, "STEP": max(2, min(block, PAIRS // block))}, 4 if block <= 256 else 8


def _configuration(dtype: str, width: int, threshold: float | None) -> Configuration:
    shape, warps = _shape(width)
    constants = {"THRESHOLD": threshold, "LEAST": torch.finfo(torch.float64).min, **shape}
    constants |= {} if threshold is None else {"count": None}
    types = dict.fromkeys(("ids", "positions", "token", "count"), "*i64")
    types |= dict.fromkeys(("masked", "eligible", "done", "committed"), "*u8") | {"score": f"*{dtype}", "width": "i32"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i64")
        for argument in commit_kernel.arg_names
    }
    rule = "count" if threshold is None else "threshold"
    return Configuration(f"commit {rule} {dtype} Q={width}", commit_kernel, signature, constants, warps)


CONFIGURATIONS = [
    _configuration(dtype, width, threshold)
    for dtype, width in (("fp64", 32), ("fp64", 1024), ("fp32", 32))
    for threshold in (0.9, None)
]
