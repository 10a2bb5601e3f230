"""The product of few rows with a weight of 8-bit integers, which are read once.

A step of one block multiplies every weight with a few dozen rows, so reading the weights takes most of its time, and
half the bytes take half the time. Without a kernel a weight is unpacked to memory first: five bytes moved per number.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.configuration import Configuration, cdiv

AT_ONCE = 4096  # rows whose float32 sums are in memory at once: more would dominate the memory of a batch's refresh
MANY = 128  # with more rows a product is bound by arithmetic, and a library multiplies the unpacked weight
PROGRAMS = 256  # at least, so that every multiprocessor loads weights: about two programs for each on an H100
TALL, DEEP = 64, 128  # outputs and inputs of a tile
BLOCK = 1024  # numbers of a program that adds parts up


@triton.jit
def linear_kernel(
    x, weight, scale, bias, out, rows, stride, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ROWS: tl.constexpr, TALL: tl.constexpr, DEEP: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: TALL outputs of ROWS rows, over one part of the inputs.

    The weight stands on the left: matrix units take 64 of its outputs at once, and as few rows as there are.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # runs fastest: tiles of rows share the weight
    output = tl.program_id(1) * TALL + tl.arange(0, TALL)
    part = tl.program_id(2)
    depth: tl.constexpr = tl.cdiv(tl.cdiv(INPUTS, DEEP), PARTS) * DEEP
    begin = part * depth
    at = tl.arange(0, DEEP)
    numbers = weight + output.to(tl.int64)[:, None] * INPUTS + at[None]  # [TALL, DEEP]
    given = x + row.to(tl.int64)[None] * stride + at[:, None]  # [DEEP, ROWS]
    here, asked = (output < OUTPUTS)[:, None], (row < rows)[None]
    total = tl.zeros([TALL, ROWS], tl.float32)
    for start in range(begin, tl.minimum(begin + depth, INPUTS), DEEP):
        left = at < INPUTS - start
        w = tl.load(numbers + start, mask=here & left[None], other=0)
        h = tl.load(given + start, mask=asked & left[:, None], other=0.0)
        if WIDE:
            h = h.to(tl.float32)
        total = tl.dot(w.to(h.dtype), h, total, input_precision="ieee")
    if PARTS > 1:
        to = (part.to(tl.int64) * rows + row[None]) * OUTPUTS + output[:, None]
        tl.store(out + to, total, mask=here & asked)
    else:
        total = _scaled(total, scale, bias, output[:, None], here)
        tl.store(out + row.to(tl.int64)[None] * OUTPUTS + output[:, None], total, mask=here & asked)


@triton.jit
def _scaled(total, scale, bias, output, here):
    total *= tl.load(scale + output, mask=here, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=here, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_kernel(parts, scale, bias, out, rows, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK outputs of one row, from the parts of their inputs in order."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = output < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * rows + row) * OUTPUTS + output, mask=here, other=0.0)
    tl.store(out + row * OUTPUTS + output, _scaled(total, scale, bias, output, here), mask=here)


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ (weight * scale).T + bias`, `[..., N]` in the dtype of `x`.

    x: `[..., K]` bfloat16, float16 or float32
    weight: `[N, K] int8`, contiguous
    scale: `[N]` float32, what an integer of each output is worth
    bias: `[N]`, in the dtype of `x`

    Sums in float32 (never in TF32), scales and rounds once.
    """
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)  # [R, K]
    rows = len(flat)
    if rows > MANY:
        return linear_reference(x, weight, scale, bias)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    (tile, warps), parts = _tile(rows, x.element_size()), _parts(outputs, inputs)
    into = out if parts == 1 else torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    linear_kernel[cdiv(rows, tile["ROWS"]), cdiv(outputs, TALL), parts](
        flat, weight, scale, bias, into, rows, flat.stride(0), outputs, inputs, **tile, PARTS=parts,
        WIDE=triton.knobs.runtime.interpret, num_warps=warps, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        sum_kernel[rows, cdiv(outputs, BLOCK)](
            into, scale, bias, out, rows, outputs, parts, BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return out


def linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `linear` computes, in torch: integers are exact in every dtype, but their sums may leave float16's range."""
    if x.dtype == torch.float16:
        return F.linear(x, (weight * scale[:, None]).to(x.dtype), bias)
    weight, flat = weight.to(x.dtype), x.reshape(-1, x.shape[-1])
    out = torch.empty(len(flat), len(weight), dtype=x.dtype, device=x.device)
    for part, into in zip(flat.split(AT_ONCE), out.split(AT_ONCE), strict=True):
        total = F.linear(part, weight).to(torch.float32).mul_(scale)
        into.copy_(total if bias is None else total.add_(bias))
    return out.view(*x.shape[:-1], len(weight))


def _tile(rows: int, size: int) -> tuple[dict[str, int], int]:
    """Of `rows` of numbers of `size` bytes, within 64 KB of shared memory; and its warps."""
    lines = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return {"ROWS": lines, "TALL": TALL, "DEEP": DEEP if size == 2 else DEEP // 2}, 8 if lines == 64 else 4


def _parts(outputs: int, inputs: int) -> int:
    """How many programs share the inputs of an output: it does not depend on the rows, so neither do their sums."""
    parts = 1
    while cdiv(outputs, TALL) * parts < PROGRAMS and inputs >= 8 * DEEP * parts:
        parts *= 2
    return parts


def _configuration(dtype: str, rows: int, outputs: int, inputs: int, bias: bool = False) -> Configuration:
    parts = _parts(outputs, inputs)
    tile, warps = _tile(rows, 4 if dtype == "fp32" else 2)
    constants: dict[str, Any] = {"OUTPUTS": outputs, "INPUTS": inputs, **tile}
    constants |= {"PARTS": parts, "WIDE": False} | ({} if bias else {"bias": None})
    signature = {"x": f"*{dtype}", "weight": "*i8", "scale": "*fp32", "rows": "i32", "stride": "i32"}
    signature |= {"out": f"*{dtype}" if parts == 1 else "*fp32"} | ({"bias": f"*{dtype}"} if bias else {})
    return Configuration(
        f"linear int8 {dtype} {outputs} x {inputs} {rows} rows",
        linear_kernel,
        {name: signature.get(name, "constexpr") for name in linear_kernel.arg_names},
        constants,
        warps,
        stages=3,
    )


def _sum_configuration(dtype: str, outputs: int, inputs: int, bias: bool) -> Configuration:
    constants = {"OUTPUTS": outputs, "PARTS": _parts(outputs, inputs), "BLOCK": BLOCK}
    constants |= {} if bias else {"bias": None}
    signature = {"parts": "*fp32", "scale": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}", "rows": "i32"}
    return Configuration(
        f"linear sum {dtype} {constants['PARTS']} parts{' bias' if bias else ''}",
        sum_kernel,
        {name: "constexpr" if name in constants else signature[name] for name in sum_kernel.arg_names},
        constants,
    )


CONFIGURATIONS = [
    *(_configuration("bf16", rows, 12288, 4096) for rows in (16, 32, 64)),  # LLaDA-8B: queries, keys and values
    *(_configuration("bf16", rows, 24576, 4096) for rows in (16, 32, 64)),  # gate and up
    *(_configuration("bf16", rows, 4096, 12288) for rows in (16, 32, 64)),  # down
    _configuration("bf16", 32, 4608, 3584, bias=True),  # Dream-7B
    _configuration("fp16", 32, 24576, 4096),
    _configuration("fp32", 64, 24576, 4096),
    _sum_configuration("bf16", 4096, 4096, bias=False),
    _sum_configuration("bf16", 4608, 3584, bias=True),
]
