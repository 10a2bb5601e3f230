"""dParallel's decoding rule: a bound on the entropy of each position."""

from dataclasses import dataclass
from math import inf

from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class EntropyThreshold(Scheduler):
    """dParallel's rule: all masks whose entropy does not exceed a bound are committed.

        while masks remain in the block:
            token, H = model(canvas), H the entropy of the prediction
            commit the masks with H <= entropy, or else the one with the lowest H

    Source: dParallel, arXiv 2509.26488, its LLaDA sampler. It is made for models trained by its certainty-forcing
    distillation, and works with any.

    Args:
        entropy: bound in nats. Below 0 it commits one position per step.
    """

    entropy: float = 0.5

    def __post_init__(self) -> None:
        check_number("scheduler.entropy", self.entropy, "a number of nats", least=-inf)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(ranks_by_confidence=False)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.entropy is not None
        unsure, eligible = readout.entropy[:, 0], canvas.eligible(query.positions)  # [B, Q]
        commit = at_least_one(unsure <= self.entropy, -unsure, eligible)
        return Edit(readout.token[:, 0], commit, score=-unsure), carry
