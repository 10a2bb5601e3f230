"""Certainty prior: positions among committed ones come first."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dllm_sampler.canvas import Canvas, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.fixed import FixedSteps


@dataclass(frozen=True)
class CertaintyPrior(FixedSteps):
    """Fixed steps, ranked by the score times how much of a position's neighbourhood is committed.

    Source: d2Cache, arXiv 2509.23094. The density is the share of committed positions under a Gaussian around the
    position; left of the generation everything counts as committed, right of it what its last position is. The order
    becomes nearly left to right. The Gaussian ends at four sigma, or a generation's length away; the published one a
    generation's length beyond both ends.

    Args:
        sigma: width of the Gaussian in positions; large values leave the score's own order.
    """

    sigma: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sigma, bool) or not 0 < self.sigma < float("inf"):
            raise UserError(f"scheduler.sigma must be a number of positions above 0, not {self.sigma!r}")
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
    reach = max(1, min(int(4 * sigma), canvas.length - canvas.origin))
    ahead, weight, total = bell(sigma, reach, positions.device)
    near = (positions[..., None] + ahead).clamp(min=0)  # [B, Q, N]
    near = torch.minimum(near, (canvas.end - 1)[:, None, None])
    masked = canvas.masked.gather(1, near.flatten(1)).view_as(near)
    return (weight * ~masked).sum(-1) / total


@cache  # for good: a recorded step (`graphs.py`) reads these tensors where they are
def bell(sigma: float, reach: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets `[2 reach + 1]`, a Gaussian over them, and its sum: the same in every step."""
    ahead = torch.arange(-reach, reach + 1, device=device)
    weight = torch.exp(-(ahead.double() ** 2) / (2 * sigma**2))
    return ahead, weight, weight.sum()
