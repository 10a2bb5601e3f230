"""The EB-sampler: commit the longest prefix whose joint uncertainty is bounded."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import rank
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.score import rate, score_needs

Proxy = Literal["entropy", "confidence", "margin"]


@dataclass(frozen=True)
class EntropyBound(Scheduler):
    """EB-Sampler: the longest run of masks whose joint uncertainty is bounded, the best ones first.

        while masks remain in the block:
            token, score, H = model(canvas), H the entropy of the prediction
            order the masks by score, the best first
            commit the longest run of the first with sum(H) - max(H) <= gamma

    Source: EB-Sampler, arXiv 2505.24857. The sum without the largest entropy bounds how much the joint law of the
    committed tokens can differ from the product of their marginals. It is published without blocks: `blocks=full`.

    Args:
        gamma: bound in nats. 0 commits one per step, infinity all.
        score: statistic that ranks the masks (the paper's error proxy). With entropy the lowest is first. RND1 uses
            confidence.
    """

    gamma: float = 0.1
    score: Proxy = "entropy"

    def __post_init__(self) -> None:
        check_number("scheduler.gamma", self.gamma, "a number of nats")
        check_choice("scheduler.score", self.score, Proxy)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(ranks_by_confidence=self.score == "confidence")

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) | score_needs(self.score)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.entropy is not None
        score, eligible = rate(self.score, canvas, query, readout), canvas.eligible(query.positions)  # [B, Q]
        commit = bounded(readout.entropy[:, 0], eligible, self.gamma, score)
        return Edit(readout.token[:, 0], commit, score=score), carry


def bounded(entropy: Tensor, eligible: Tensor, bound: float, score: Tensor | None = None) -> Tensor:
    """Return `[B, Q] bool` the most `eligible` positions whose entropies without the largest sum to `bound` at most.

    Args:
        entropy: `[B, Q]` the numbers that are summed.
        score: `[B, Q]` order of the run, higher first. With None the lowest entropy is first.
    """
    place = rank(-entropy if score is None else score, eligible)
    ordered = torch.zeros_like(entropy).scatter_(1, place, entropy.masked_fill(~eligible, torch.inf))
    nothing = torch.zeros_like(ordered[:, :1])
    sums = torch.cat([nothing, ordered.cumsum(1)[:, :-1]], 1)  # before each one
    largest = torch.cat([nothing, ordered.cummax(1).values[:, :-1]], 1)
    without = sums + (ordered - largest).clamp(max=0)  # of those up to each one, without the largest of them
    return eligible & (without.gather(1, place) <= bound)
