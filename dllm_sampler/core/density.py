"""The share of a position's neighbourhood that is committed (d2Cache, arXiv 2509.23094)."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.values import Canvas


def density(canvas: Canvas, positions: Tensor, sigma: float) -> Tensor:
    """Return `[B, Q]` the committed share around each of `positions`, weighted by a Gaussian of width `sigma`."""
    offset, weight, total = bell(sigma, canvas.layout.longest, positions.device)
    near = positions[..., None] + offset  # [B, Q, N]
    place, length = near - canvas.layout.first[:, None, None], canvas.layout.new_tokens[:, None, None]
    within = (place >= -length) & (place < 2 * length)  # farther columns count as masked
    near = torch.minimum(near.clamp(min=0), (canvas.end - 1)[:, None, None])
    masked = canvas.masked.gather(1, near.flatten(1)).view_as(near)
    # Summed one by one: a row sums more zeros among longer ones, and the same numbers in the same order.
    return (weight * (within > masked)).cumsum(-1)[..., -1] / total[canvas.layout.new_tokens][:, None]


@cache  # for good: a recorded step (`engine/graphs.py`) reads these tensors where they are
def bell(sigma: float, longest: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets `[N]` (nearest first), their Gaussian weights `[N]`, and normalisers `[longest + 1]`.

    Normaliser n, for an answer of n tokens, is the sum over the nearest 6 n offsets, as published. Offsets beyond
    twice `longest` are left out of N: no column that counts is so far away. So are offsets beyond nine `sigma`, whose
    weights do not change a float64 sum.
    """
    near = 2 * min(2 * longest, math.ceil(9 * sigma)) + 1
    with torch.inference_mode(False):  # other steps may run without it
        offset = torch.arange(6 * longest, device=device)
        offset = torch.where(offset % 2 == 0, offset // 2, -(offset // 2) - 1)  # 0, -1, 1, -2, 2, ...
        weight = torch.exp(-(offset.double() ** 2) / (2 * sigma**2))
        total = F.pad(weight.cumsum(0)[5::6], (1, 0))
        made = offset[:near].clone(), weight[:near].clone(), total
    select.wait_for(device)
    return made
