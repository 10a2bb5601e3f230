"""Fast-dLLM's confidence threshold: commit every position the model is sure of."""

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drawn_positions import DrawnPositions


@dataclass(frozen=True)
class Threshold(DrawnPositions):
    """Commit the masks of the block whose confidence reaches the threshold, and the surest one in any case.

    Source: Fast-dLLM, arXiv 2505.22618. "Reaches" is >=, as in the published code.

    Args:
        threshold: probability; above 1 it commits one position per step.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.threshold", self.threshold, "a probability (above 1: one per step)")

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        commit = self.chosen_or_one(canvas, query, sure >= self.threshold, sure, eligible)
        return Edit(readout.token[:, 0], commit), carry
