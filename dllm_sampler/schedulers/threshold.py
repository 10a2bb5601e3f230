"""Fast-dLLM's confidence threshold: commit every position the model is sure of."""

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drawn_positions import DrawnPositions


@dataclass(frozen=True)
class Threshold(DrawnPositions):
    """Fast-dLLM's threshold: all masks of the block that the model is sure of are committed.

        while masks remain in the block:
            token, confidence = model(canvas)
            commit the masks with confidence >= threshold, or else the surest

    Source: Fast-dLLM, arXiv 2505.22618, with >= as in the published code.

    Args:
        threshold: probability. Above 1 it commits one position per step.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.threshold", self.threshold, "a probability")

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        commit = self.chosen_or_one(canvas, query, sure >= self.threshold, sure, eligible)
        return Edit(readout.token[:, 0], commit), carry
