"""A Triton kernel that reads memory and does nothing else: how fast weights can come in at best."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# A kernel is not Python: pyright knows nothing of its tiles and launches.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # numbers of a tile: 32 for each of 256 threads, eight loads of 16 bytes on their way
WARPS = 8


@triton.jit
def read_kernel(source, out, size, BLOCK: tl.constexpr):
    """One program: the largest number of every n-th block, of n programs."""
    at = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -(2**31), tl.int32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        most = tl.maximum(most, tl.load(source + start + at, mask=start + at < size, other=-(2**31)))
    tl.store(out + tl.program_id(0), tl.max(most, 0))


def largest(source: Tensor, programs: int) -> Tensor:
    """Return `[programs] int32` whose largest number is that of `source`. Every number of `source` is read once.

    source: `[N] int32`, contiguous, fewer than 2^31 numbers less a turn of all programs
    """
    out = torch.empty(programs, dtype=torch.int32, device=source.device)
    read_kernel[(programs,)](source, out, source.numel(), BLOCK, num_warps=WARPS)
    return out
