"""Choosing positions, and writing their tokens into the canvas, in one launch."""

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
    ids, masked, positions, token, score, eligible, wanted, done, count, committed,
    ids_stride, masked_stride, position_stride, token_stride, score_stride, eligible_stride, wanted_stride, width,
    THRESHOLD: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: one row of the batch, all its queried positions."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    may = inside & (tl.load(eligible + row * eligible_stride + lane, mask=inside, other=0) != 0)
    if done is not None:
        may = may & (tl.load(done + row + lane * 0) == 0)
    own = tl.load(score + row * score_stride + lane, mask=inside, other=-float("inf"))
    if count is None:
        # As `select.at_least_one`: a NaN among the candidates leaves the row without a leader.
        best = tl.max(tl.where(may & (own == own), own, -float("inf")))
        spoilt = tl.max((may & (own != own)).to(tl.int32))
        leader = tl.min(tl.where(may & (own == best), lane, BLOCK)) + spoilt * BLOCK
        if wanted is None:
            sure = own >= tl.full([1], THRESHOLD, own.dtype)
        else:
            sure = tl.load(wanted + row * wanted_stride + lane, mask=inside, other=0) != 0
        chosen = may & (sure | (lane == leader))
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
    if ids is not None:
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
    return _launch((ids, masked, positions, token), score, eligible, None, done, count, threshold)


def choose(score: Tensor, eligible: Tensor, *, wanted: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """`[B, Q] bool` what to commit, nothing written: `commit` for those who write by themselves.

    score, eligible, count: as in `commit`
    wanted: `[B, Q] bool` commit these, and the best eligible position in any case: `select.at_least_one`
    """
    check_rule(wanted, count)
    return _launch((None, None, None, None), score, eligible, wanted, None, count, None)


def _launch(
    into: tuple[Tensor | None, ...],
    score: Tensor,
    eligible: Tensor,
    wanted: Tensor | None,
    done: Tensor | None,
    count: Tensor | None,
    threshold: float | None,
) -> Tensor:
    """into: ids, masked, positions, token."""
    batch, width = score.shape
    committed = torch.empty(batch, width, dtype=torch.bool, device=score.device)
    if not committed.numel():
        return committed
    constants, warps = _shape(width)
    tables = [*into[:2], *(None if one is None else lined(one) for one in (*into[2:], score, eligible, wanted))]
    commit_kernel[(batch,)](
        *flags(
            *tables,
            None if done is None else done.contiguous(),
            None if count is None else count.contiguous(),
            committed,
        ),
        *(0 if table is None else table.stride(0) for table in tables),
        width,
        THRESHOLD=threshold,
        LEAST=torch.finfo(score.dtype).min,
        **constants,
        num_warps=warps,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return committed


def _shape(width: int) -> tuple[dict[str, int], int]:
    block = max(2, next_power_of_2(width))
    return {"BLOCK": block, "STEP": max(2, min(block, PAIRS // block))}, 4 if block <= 256 else 8


def _configuration(dtype: str, width: int, rule: str, writes: bool) -> Configuration:
    shape, warps = _shape(width)
    threshold = 0.9 if rule == "threshold" else None
    constants: dict[str, Any] = {"THRESHOLD": threshold, "LEAST": torch.finfo(torch.float64).min, **shape}
    constants |= dict.fromkeys(name for name in ("wanted", "count") if name != rule)
    constants |= {} if writes else dict.fromkeys(("ids", "masked", "positions", "token", "done"))
    types = dict.fromkeys(("ids", "positions", "token", "count"), "*i64") | {"score": f"*{dtype}", "width": "i32"}
    types |= dict.fromkeys(("masked", "eligible", "wanted", "done", "committed"), "*u8")
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i64")
        for argument in commit_kernel.arg_names
    }
    name = f"{'commit' if writes else 'choose'} {rule} {dtype} Q={width}"
    return Configuration(name, commit_kernel, signature, constants, warps)


CONFIGURATIONS = [
    _configuration(dtype, width, rule, writes)
    for dtype, width in (("fp64", 32), ("fp64", 1024), ("fp32", 32))
    for rule, writes in (("threshold", True), ("count", True), ("wanted", False), ("count", False))
]
