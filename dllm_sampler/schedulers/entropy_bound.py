"""The EB-sampler: commit the longest prefix whose joint uncertainty is bounded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import rank
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class EntropyBound(Scheduler):
    """Commit the longest run of masks, lowest entropy first, whose entropies without the last sum to at most gamma.

    Source: EB-Sampler, arXiv 2505.24857. The sum without the largest entropy bounds how much the joint of the
    committed tokens can differ from the product of their marginals. Published without blocks: `blocks=full`.

    Args:
        gamma: bound in nats; 0 commits one per step, infinity all.
    """

    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_number("scheduler.gamma", self.gamma, "a number of nats")

    @property
    def traits(self) -> Traits:
        """It ranks by entropy."""
        return Traits(ranks_by_confidence=False)

    @property
    def needs(self) -> frozenset[str]:
        """Entropy."""
        return frozenset({"entropy"})

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        assert readout.entropy is not None
        entropy, eligible = readout.entropy[:, 0], canvas.eligible(query.positions)  # [B, Q]
        return Edit(readout.token[:, 0], bounded(entropy, eligible, self.gamma), score=-entropy), carry


def bounded(entropy: Tensor, eligible: Tensor, bound: float) -> Tensor:
    """`[B, Q] bool` most `eligible` positions, lowest entropy first, that sum to `bound` without their last."""
    place = rank(-entropy, eligible)
    ascending = torch.zeros_like(entropy).scatter_(1, place, entropy.masked_fill(~eligible, torch.inf))
    before = torch.cat([torch.zeros_like(ascending[:, :1]), ascending.cumsum(1)[:, :-1]], 1)  # sum without itself
    return eligible & (before.gather(1, place) <= bound)
