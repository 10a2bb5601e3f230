"""Fast-dLLM's factor rule: commit as many positions as their joint uncertainty allows."""

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import rank
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drawn_positions import DrawnPositions


@dataclass(frozen=True)
class Factor(DrawnPositions):
    """Fast-dLLM's factor rule: the more positions are committed together, the surer each must be.

        while masks remain in the block:
            token, confidence = model(canvas)
            c[n] = confidence of the n-th surest mask
            n = the largest number with (n + 1) * (1 - c[n]) <= factor, at least 1
            commit the n surest masks

    Source: Fast-dLLM, arXiv 2505.22618. The inequality is the published code's. The paper's is strict.

    Args:
        factor: larger commits more. 0 commits one per step unless a confidence is exactly 1.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.factor", self.factor)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        place = rank(sure, eligible)  # 0-based; n = place + 1
        # The bound rises with the rank and confidences fall, so the passing ranks are a prefix: no scan is needed.
        passes = (sure >= 1 - self.factor / (place + 2).double()) & eligible
        chosen = place < passes.sum(1, keepdim=True)
        return Edit(readout.token[:, 0], self.chosen_or_one(canvas, query, chosen, sure, eligible)), carry
