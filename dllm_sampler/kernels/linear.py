"""The product of few rows with a weight of 8-bit integers, which are read once.

A step of one block multiplies every weight with a few dozen rows, so reading the weights takes most of its time. Half
the bytes take half the time. Without a kernel a weight is unpacked to memory first: five bytes moved per number.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.sizes import cdiv

AT_ONCE = 4096  # rows whose float32 sums are in memory at once: more would dominate the memory of a batch's refresh
MANY = 128  # with more rows a product is bound by arithmetic, and a library multiplies the unpacked weight
PROGRAMS = 256  # at least, so that every multiprocessor loads weights: about two programs for each on an H100
TALL, DEEP = 32, 256  # outputs and inputs of a tile, at most: Triton loads taller ones by 8 bytes, not 16
WARPS, STAGES = 4, 3


@triton.jit
def linear_kernel(
    x, weight, scale, bias, out, rows, stride, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ROWS: tl.constexpr, TALL: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute TALL outputs of ROWS rows.

    The weight is the left factor: matrix units take 16 of its outputs at once, and as few rows as there are.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # runs fastest: tiles of rows share the weight
    output = tl.program_id(1) * TALL + tl.arange(0, TALL)
    at = tl.arange(0, DEEP)
    numbers = weight + output.to(tl.int64)[:, None] * INPUTS + at[None]  # [TALL, DEEP]
    given = x + row.to(tl.int64)[None] * stride + at[:, None]  # [DEEP, ROWS]
    here, asked = (output < OUTPUTS)[:, None], (row < rows)[None]
    total = tl.zeros([TALL, ROWS], tl.float32)
    for start in range(0, INPUTS, DEEP):
        left = at < INPUTS - start
        w = tl.load(numbers + start, mask=here & left[None], other=0)
        h = tl.load(given + start, mask=asked & left[:, None], other=0.0)
        if WIDE:
            h = h.to(tl.float32)
        total = tl.dot(w.to(h.dtype), h, total, input_precision="ieee")
    total *= tl.load(scale + output, mask=output < OUTPUTS, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row.to(tl.int64)[None] * OUTPUTS + output[:, None], total, mask=here & asked)


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ (scale[:, None] * weight).T + bias`, `[..., N]` in the dtype of `x`.

    It sums in float32 (never in TF32), scales and rounds once.

    Args:
        x: `[..., K]` bfloat16, float16 or float32.
        weight: `[N, K] int8`, contiguous.
        scale: `[N] float32` factor of the integers of each output.
        bias: `[N]`, in the dtype of `x`.
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
    shape = tile(rows, outputs, x.element_size())
    linear_kernel[cdiv(rows, shape["ROWS"]), cdiv(outputs, shape["TALL"])](
        flat, weight, scale, bias, out, rows, flat.stride(0), outputs, inputs, **shape,
        WIDE=triton.knobs.runtime.interpret, num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` in torch. In float16 the weight is scaled first, since sums of integers may exceed its range."""
    if x.dtype == torch.float16:
        return F.linear(x, (weight * scale[:, None]).to(x.dtype), bias)
    weight, flat = weight.to(x.dtype), x.reshape(-1, x.shape[-1])
    out = torch.empty(len(flat), len(weight), dtype=x.dtype, device=x.device)
    for part, into in zip(flat.split(AT_ONCE), out.split(AT_ONCE), strict=True):
        total = F.linear(part, weight).to(torch.float32).mul_(scale)
        into.copy_(total if bias is None else total.add_(bias))
    return out.view(*x.shape[:-1], len(weight))


def tile(rows: int, outputs: int, size: int) -> dict[str, int]:
    """Return the tile for `rows` of numbers of `size` bytes.

    With few `outputs` tiles are lower, so that there are more programs. One program has all inputs of an output, so no
    second kernel adds parts up, and a row's sums do not depend on its batch.
    """
    tall = TALL if cdiv(outputs, TALL) >= PROGRAMS else TALL // 2
    return {"ROWS": 16 if rows <= 16 else 32, "TALL": tall, "DEEP": DEEP * 2 // size}
