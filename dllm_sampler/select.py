"""Choosing positions without reading the host: stable ties, the lower position wins."""

from __future__ import annotations

import torch
from torch import Tensor


def columns(chosen: Tensor, width: int) -> Tensor:
    """Sorted column numbers of a set, in a static size.

    Args:
        chosen: `[B, L+1] bool`, never true at the empty slot L.
        width: Q; rows with more members lose the last ones, rows with fewer pad with L.

    Returns:
        `[B, width] int64`.
    """
    batch, size = chosen.shape
    rank = chosen.cumsum(1) - 1
    slot = torch.where(chosen & (rank < width), rank, width)
    column = torch.arange(size, device=chosen.device).expand(batch, size)
    out = column.new_full((batch, width + 1), size - 1)
    return out.scatter_(1, slot, column)[:, :width]


def rank(score: Tensor, eligible: Tensor) -> Tensor:
    """`[B, Q]` place of each eligible position by descending score (0 is best); the others come last."""
    # An eligible score of -inf still comes before every ineligible position.
    score = score.clamp(min=torch.finfo(score.dtype).min).masked_fill(~eligible, -torch.inf)
    order = score.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return order.scatter(1, order, place)


def top(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """`[B, Q] bool` the `count [B]` best eligible positions by score `[B, Q]`; all of them where there are fewer."""
    return (rank(score, eligible) < count[:, None]) & eligible


def at_least_one(chosen: Tensor, score: Tensor, eligible: Tensor) -> Tensor:
    """`[B, Q] bool` the eligible among `chosen`, and the best eligible position in any case."""
    best = score.masked_fill(~eligible, -torch.inf).amax(1, keepdim=True)
    leader = eligible & (score >= best)
    return eligible & (chosen | (leader & (leader.cumsum(1) == 1)))
