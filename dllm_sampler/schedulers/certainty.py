"""Certainty prior: positions among committed ones come first."""

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_positive
from dllm_sampler.core.density import density
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.score import check_factors


@dataclass(frozen=True)
class CertaintyPrior(FixedSteps):
    """Certainty prior: a fixed number of steps that prefer positions among committed ones.

        while masks remain in the block:
            token, score = model(canvas)
            density = share of a Gaussian of width sigma around each mask
                that falls on committed positions
            n = number of masks due in this step, by steps and schedule
            commit the n masks with the highest score * density

    Source: d2Cache, arXiv 2509.23094. As published, positions before the answer count as committed, and those after
    it count like its last one. Positions more than one answer length beyond either end count as masked. The order
    becomes nearly left to right. Scores that are negative numbers (entropy, position) are refused.

    Args:
        score: see `FixedSteps`.
        sigma: width of the Gaussian in positions. Large values leave the score's own order.
    """

    sigma: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scheduler.sigma", self.sigma, "a number of positions")
        check_factors(self.score)

    @property
    def traits(self) -> Traits:
        """Traits of a rule whose density depends on the whole answer."""
        return replace(super().traits, scope="answer")

    @override
    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        return super().rate(canvas, query, readout) * self.density(canvas, query.positions)

    def density(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """Return `[B, Q]` the density of committed columns around the positions."""
        return density(canvas, positions, self.sigma)
