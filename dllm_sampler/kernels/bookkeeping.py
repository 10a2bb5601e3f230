"""`dllm_sampler.bookkeeping`, each function in one launch."""

# pyright: reportCallIssue=false
# It knows nothing of launches.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_sampler.bookkeeping import NOBODY
from dllm_sampler.kernels.arguments import flags, lined
from dllm_sampler.kernels.configuration import Configuration, cdiv, next_power_of_2
from dllm_sampler.kernels.rows import (
    advance_kernel,
    eligible_kernel,
    noise_kernel,
    noise_left_kernel,
    note_kernel,
    report_kernel,
    vouch_kernel,
    write_kernel,
)

MOST = 1024  # columns, positions or rows that a program looks at at once, at most
BLOCK = 256  # columns of a block, which is as wide as it is however little noise is left in it


def eligible(masked: Tensor, positions: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """See `bookkeeping.eligible`."""
    batch, width = positions.shape
    out = torch.empty(batch, width, dtype=torch.bool, device=masked.device)
    masked, positions, block = lined(masked), lined(positions), _block(width)
    eligible_kernel[batch, cdiv(width, block)](
        *flags(masked, positions, start.contiguous(), stop.contiguous(), out),
        masked.stride(0), positions.stride(0), width, **_options(block),
    )  # fmt: skip
    return out


def noise(ids: Tensor, masked: Tensor, start: Tensor, stop: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """See `bookkeeping.noise`."""
    batch, columns = ids.shape
    positions, tokens = ids.new_empty(2, batch, width)
    ids, masked = lined(ids), lined(masked)
    noise_kernel[batch,](
        *flags(ids, masked, start.contiguous(), stop.contiguous(), positions, tokens),
        ids.stride(0), masked.stride(0), columns - 1, width, **_options(BLOCK),
    )  # fmt: skip
    return positions, tokens


def noise_left(masked: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """See `bookkeeping.noise_left`."""
    out, masked = torch.empty_like(start, memory_format=torch.contiguous_format), lined(masked)
    noise_left_kernel[len(out),](
        *flags(masked, start.contiguous(), stop.contiguous(), out), masked.stride(0), **_options(BLOCK)
    )
    return out


def vouch(
    masked: Tensor,
    positions: Tensor,
    start: Tensor,
    stop: Tensor,
    done: Tensor,
    step: Tensor,
    bad: Tensor,
    confidence: Tensor,
    commit: Tensor,
    token: Tensor,
    forbidden: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `bookkeeping.vouch`."""
    batch, width = positions.shape
    now = torch.empty(batch, dtype=bad.dtype, device=bad.device)
    may = torch.empty(batch, width, dtype=torch.bool, device=bad.device)
    masked, positions, confidence, commit, token = map(lined, (masked, positions, confidence, commit, token))
    vouch_kernel[batch,](
        *flags(
            masked, positions, start.contiguous(), stop.contiguous(), done.contiguous(), step.contiguous(),
            bad.contiguous(), confidence, commit, None if forbidden is None else token, now, may,
        ),
        masked.stride(0), positions.stride(0), confidence.stride(0), confidence.stride(1), commit.stride(0),
        token.stride(0), confidence.shape[1], width, FORBIDDEN=forbidden, **_options(_block(width)),
    )  # fmt: skip
    return now, may


def write(
    ids: Tensor,
    masked: Tensor,
    frozen: Tensor,
    done: Tensor,
    positions: Tensor,
    token: Tensor,
    commit: Tensor,
    remask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `bookkeeping.write`."""
    (batch, columns), width = ids.shape, positions.shape[1]
    new_ids = torch.empty(batch, columns, dtype=ids.dtype, device=ids.device)
    new_masked = torch.empty(batch, columns, dtype=torch.bool, device=ids.device)
    ids, masked, frozen, positions, token, commit = map(lined, (ids, masked, frozen, positions, token, commit))
    again = None if remask is None else lined(remask)
    write_kernel[batch, cdiv(columns, MOST)](
        *flags(ids, masked, frozen, done.contiguous(), positions, token, commit, again, new_ids, new_masked),
        *(table.stride(0) for table in (ids, masked, frozen, positions, token, commit)),
        0 if again is None else again.stride(0), columns, width, **_options(MOST), QUERY=_block(width),
    )  # fmt: skip
    return new_ids, new_masked


def note(
    step_map: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    positions: Tensor,
    wrote: Tensor | None,
    commit: Tensor,
    was: Tensor,
    noise: Tensor,
    step: Tensor,
    sure: Tensor,
    unsure: Tensor | None = None,
) -> None:
    """See `bookkeeping.note`; `step_map`, `logprob` and `entropy` are contiguous."""
    batch, width = positions.shape
    assert step_map.is_contiguous() and logprob.is_contiguous()
    entropy, unsure = (None, None) if entropy is None or unsure is None else (entropy, lined(unsure))
    positions, commit, was, noise, sure = map(lined, (positions, commit, was, noise, sure))
    wrote = None if wrote is None else lined(wrote)
    block = _block(width)
    note_kernel[batch, cdiv(width, block)](
        *flags(step_map, logprob, entropy, positions, wrote, commit, was, noise, step.contiguous(), sure, unsure),
        *(0 if table is None else table.stride(0) for table in (positions, wrote, commit, was, noise, sure, unsure)),
        step_map.shape[1], width, **_options(block),
    )  # fmt: skip


def advance(
    start: Tensor,
    stop: Tensor,
    begin: Tensor,
    end: Tensor,
    age: Tensor,
    step: Tensor,
    done: Tensor,
    closed: Tensor,
    finish: Tensor | None,
    lookahead: int,
    grid: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `bookkeeping.advance`."""
    rows = len(start)
    numbers = torch.empty(4, rows, dtype=start.dtype, device=start.device)
    now = torch.empty(rows, dtype=torch.bool, device=start.device)
    given = (start, stop, begin, end, age, step, done, closed, finish)
    block = _block(rows)
    advance_kernel[cdiv(rows, block),](
        *flags(*(None if one is None else one.contiguous() for one in given), numbers, now),
        rows, lookahead, grid, **_options(block),
    )  # fmt: skip
    start, stop, age, step = numbers
    return start, stop, age, step, now


def report(
    left: Tensor,
    start: Tensor,
    stop: Tensor,
    begin: Tensor,
    end: Tensor,
    age: Tensor,
    done: Tensor,
    bad: Tensor,
    count: Tensor | None = None,
    limit: Tensor | None = None,
    lasts: Tensor | None = None,
    least: Tensor | None = None,
    later: Tensor | None = None,
) -> Tensor:
    """See `bookkeeping.report`."""
    if lasts is None or least is None:
        lasts = least = later = None
    out = torch.empty(9 if lasts is None else 13, dtype=torch.int64, device=done.device)
    return _report(out, left, start, stop, begin, end, age, done, bad, count, limit, lasts, least, later)


def ended(done: Tensor, bad: Tensor) -> Tensor:
    """See `bookkeeping.ended`."""
    out = torch.empty(2, dtype=torch.bool, device=done.device)
    return _report(out, None, None, None, None, None, None, done, bad, None, None, None, None, None)


def _report(out: Tensor, *of_rows: Tensor | None) -> Tensor:
    done = of_rows[6]
    assert done is not None
    report_kernel[1,](
        *flags(*(None if one is None else one.contiguous() for one in of_rows), out),
        len(done), LONG=of_rows[0] is not None, NONE=NOBODY, **_options(_block(len(done))),
    )  # fmt: skip
    return out


def _block(size: int) -> int:
    """As many as there are; no fewer than a warp or two have, for each size is another binary."""
    return min(MOST, max(64, next_power_of_2(size)))


def _options(block: int) -> dict[str, Any]:
    return {"BLOCK": block, "num_warps": 1 if block <= 64 else 4, "num_stages": 2, "enable_fp_fusion": True}


FLAGS = ["masked", "frozen", "commit", "remask", "wrote", "was", "noise", "done", "closed", "finish", "may"]
INTEGERS = ["width", "candidates", "columns", "rows", "lookahead", "grid", "empty"]


def _configuration(name: str, kernel: Any, size: int, absent: str = "", **constants: Any) -> Configuration:
    """A launch without the arguments `absent`; an integer that is 1 is a constant in one."""
    options = _options(_block(size))
    constants |= {"BLOCK": options["BLOCK"], **dict.fromkeys(absent.split())}
    types = dict.fromkeys([*FLAGS, "new_masked"], "*u8") | dict.fromkeys(INTEGERS, "i32")
    types |= {"confidence": "*fp64", "sure": "*fp64", "unsure": "*fp64", "logprob": "*fp32", "entropy": "*fp32"}
    types["out"] = "*u8" if kernel is eligible_kernel or constants.get("LONG") is False else "*i64"
    types["now"] = "*u8" if kernel is advance_kernel else "*i64"
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "i64" if argument.endswith("stride") else "*i64")
        for argument in kernel.arg_names
    }
    return Configuration(f"bookkeeping {name}", kernel, signature, constants, options["num_warps"])


REST = "count limit lasts least later"
CONFIGURATIONS = [
    *(_configuration(f"eligible Q={width}", eligible_kernel, width) for width in (32, 1024)),
    _configuration("noise Q=32", noise_kernel, BLOCK),
    _configuration("noise left", noise_left_kernel, BLOCK),
    *(_configuration(f"vouch Q={width}", vouch_kernel, width, "token", FORBIDDEN=None) for width in (32, 1024)),
    _configuration("vouch one hypothesis Q=32", vouch_kernel, 32, FORBIDDEN=126336, candidates=1),
    *(_configuration(f"write Q={width}", write_kernel, MOST, "remask", QUERY=_block(width)) for width in (32, 1024)),
    _configuration("write remask Q=32", write_kernel, MOST, QUERY=_block(32)),
    _configuration("note Q=32", note_kernel, 32, "entropy unsure wrote"),
    _configuration("note Q=1024 entropy", note_kernel, 1024, "commit was noise"),
    _configuration("advance B=64", advance_kernel, 64, "finish grid"),
    _configuration("advance B=1 grid", advance_kernel, 1, rows=1),
    _configuration("report B=64", report_kernel, 64, "limit lasts least later", LONG=True, NONE=NOBODY),
    _configuration("report certain B=1", report_kernel, 1, LONG=True, NONE=NOBODY, rows=1),
    _configuration(
        "report ended B=64", report_kernel, 64, f"left start stop begin end age {REST}", LONG=False, NONE=NOBODY
    ),
]
