"""dInfer's threshold rule: near-ties with the surest mask are committed with it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_share
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class DInferThreshold(Threshold):
    """dInfer's threshold: near-ties with the surest mask are committed with it.

        while masks remain in the block:
            token, confidence = model(canvas)
            best = highest confidence of the masks
            commit the masks with confidence >= min(threshold, best - slack)

    Source: dInfer, arXiv 2510.08666. The published comparison is in float32, this one in float64.

    Args:
        threshold: probability. Above 1 only the best and its near-ties are committed.
        slack: largest difference from the best confidence that counts as a tie. Not used if `position_temperature` is
            above 0.
    """

    slack: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("scheduler.slack", self.slack, "a difference of probabilities")

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        return self.commit(canvas, query, readout.token[:, 0], readout.confidence[:, 0]), carry

    def commit(self, canvas: Canvas, query: Query, token: Tensor, sure: Tensor) -> Edit:
        """Return the edit for predicted tokens `token [B, Q]` and their probabilities `sure [B, Q]`."""
        eligible = canvas.eligible(query.positions)
        if self.position_temperature:
            commit = self.chosen_or_one(canvas, query, sure >= self.threshold, sure, eligible)
            return Edit(token, commit, score=sure)
        best = sure.masked_fill(~eligible, -torch.inf).amax(1, keepdim=True)
        return Edit(token, eligible & (sure >= (best - self.slack).clamp(max=self.threshold)), score=sure)
