"""Certainty prior: positions among committed ones come first."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_positive
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.fixed import FixedSteps


@dataclass(frozen=True)
class CertaintyPrior(FixedSteps):
    """Fixed steps, ranked by the score times how much of a position's neighbourhood is committed.

    Source: d2Cache, arXiv 2509.23094. The density is the share of committed positions under a Gaussian around the
    position. As published, it looks one length of the generation beyond either end: everything before the generation
    counts as committed, everything after it as its last position does. The order becomes nearly left to right.

    Args:
        sigma: width of the Gaussian in positions; large values leave the score's own order.
    """

    sigma: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scheduler.sigma", self.sigma, "a number of positions")
        if self.score == "entropy":
            raise UserError("scheduler.score=entropy cannot be scaled by a density: use confidence or margin")

    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """See `FixedSteps.rate`."""
        return super().rate(canvas, query, readout) * self.density(canvas, query.positions)

    def density(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """See `density`."""
        return density(canvas, positions, self.sigma)


def density(canvas: Canvas, positions: Tensor, sigma: float) -> Tensor:
    """`[B, Q]` share of committed positions under a Gaussian of width `sigma` around each of `positions [B, Q]`."""
    length = canvas.new_tokens
    ahead, weight = bell(sigma, length, positions.device)
    near = positions[..., None] + ahead  # [B, Q, N]
    place = near - canvas.first[:, None, None]
    within = place == place.clamp(-length, 2 * length - 1)  # farther columns count as masked
    near = torch.minimum(near.clamp(min=0), (canvas.end - 1)[:, None, None])
    masked = canvas.masked.gather(1, near.flatten(1)).view_as(near)
    return (weight * (within > masked)).sum(-1)


@cache  # for good: a recorded step (`engine/graphs.py`) reads these tensors where they are
def bell(sigma: float, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Offsets `[N]` and a Gaussian over them, the same in every step.

    It sums to 1 over three times `length` on either side, as published. No position is farther than twice `length` from
    what is counted, and what is farther than nine sigma does not change a float64 sum.
    """
    ahead = torch.arange(-3 * length, 3 * length, device=device)
    weight = torch.exp(-(ahead.double() ** 2) / (2 * sigma**2))
    near = min(2 * length, math.ceil(9 * sigma))
    middle = slice(3 * length - near, 3 * length + near + 1)
    return ahead[middle].clone(), (weight / weight.sum())[middle].clone()
