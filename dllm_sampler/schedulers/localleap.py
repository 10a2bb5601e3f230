"""LocalLeap: a relaxed threshold in the neighbourhood of sure tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class LocalLeap(Threshold):
    """LocalLeap: a threshold that is lower in the neighbourhood of sure masks.

        while masks remain in the block:
            token, confidence = model(canvas)
            anchors = masks with confidence >= threshold
            near = masks within radius of an anchor, with confidence >= relaxed
            commit anchors and near, or else the surest mask

    Source: LocalLeap, arXiv 2510.07081. Only masks of this step are anchors: neither committed tokens nor masks that
    the relaxed threshold accepts.

    Args:
        threshold: probability that makes a mask an anchor.
        relaxed: probability that suffices near an anchor. From `threshold` on it changes nothing.
        radius: positions on each side of an anchor. 0 is plain threshold decoding.
    """

    relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.relaxed", self.relaxed, "a probability")
        check_count("scheduler.radius", self.radius, 0)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        anchor = eligible & (sure >= self.threshold)
        # Neighbours are columns, not neighbours in the query: committed tokens between them count as distance.
        row = torch.zeros(canvas.ids.shape, device=sure.device).scatter_(1, query.positions, anchor.float())
        near = F.max_pool1d(row[:, None], 2 * self.radius + 1, 1, self.radius)[:, 0].gather(1, query.positions) > 0
        ready = self.ready(anchor, near, sure)
        return Edit(readout.token[:, 0], self.chosen_or_one(canvas, query, ready, sure, eligible)), carry

    def ready(self, anchor: Tensor, near: Tensor, sure: Tensor) -> Tensor:
        """Return `[B, Q] bool` positions to commit: each `anchor`, and those `near` one that are `sure` enough."""
        return anchor | (near & (sure >= self.relaxed))
