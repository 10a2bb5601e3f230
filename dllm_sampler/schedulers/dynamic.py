"""The sampler of block-causal models: a fixed number of masks per step, or all sure ones if these are more."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.budget import uniform_share
from dllm_sampler.schedulers.score import Score, rate, score_needs
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class DynamicThreshold(Threshold):
    """The sampler of block-causal models: a fixed number of masks per step, or all sure ones if these are more.

        while masks remain in the block:
            token, confidence, score = model(canvas)
            n = length of the block / steps, rounded up in the first steps
            sure = masks with confidence > threshold
            commit sure if they are n or more, else the n masks of highest score

    Source: SDAR, arXiv 2510.06303 (`low_confidence_dynamic`; a threshold of 1 is its `low_confidence_static`, with
    `score=position` its `sequential`), TraDo, arXiv 2509.06949, and LLaDA2, arXiv 2512.15745 (threshold decode). A
    block that begins with prompt tokens, or that the canvas cuts, has the pace of a whole one. Where fewer masks are
    left than n, SDAR's code overwrites tokens. Here those masks are taken.

    Args:
        threshold: probability a mask must exceed. From 1 on only the share counts.
        steps: forwards for a whole block (not for the generation). By default one per position.
        score: statistic that ranks the masks if too few are above the threshold. With position it is left to right.
    """

    steps: int | None = None
    score: Score = "confidence"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.steps", self.steps, optional=True)
        check_choice("scheduler.score", self.score, Score)
        if self.position_temperature and self.score != "confidence":
            raise UserError(
                "options-conflict",
                f"scheduler.position_temperature draws by confidence, not by scheduler.score={self.score}. Remove one"
                " of them.",
            )

    @property
    def traits(self) -> Traits:
        """Traits of a rule whose threshold compares confidences, unless it is 1 or more."""
        ranks = self.threshold < 1 or self.score == "confidence"
        draws = super().traits.draws_order or self.score == "random"
        return replace(super().traits, ranks_by_confidence=ranks, draws_order=draws, scheduled=True)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return score_needs(self.score)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` positions of the block when it was opened, since a stop may shorten the canvas later."""
        return torch.zeros_like(canvas.start)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        length = torch.where(canvas.age == 0, canvas.stop - canvas.start, carry)
        score, eligible = rate(self.score, canvas, query, readout), canvas.eligible(query.positions)
        score = self.order(canvas, query, score) if self.score == "confidence" else score
        commit = self.chosen(readout.confidence[:, 0], score, eligible, self.share(canvas, length))
        return Edit(readout.token[:, 0], commit), length

    def share(self, canvas: Canvas, length: Tensor) -> Tensor:
        """Return `[B]` the least number of positions that this step commits, in a block of `length [B]`."""
        grid = canvas.layout.grid
        whole = length if grid is None else torch.full_like(length, grid.part or grid.length)
        steps = whole if self.steps is None else torch.full_like(whole, self.steps)
        return uniform_share(whole, steps.clamp(min=1), canvas.age).clamp(min=1)

    def chosen(self, confidence: Tensor, score: Tensor, eligible: Tensor, share: Tensor) -> Tensor:
        """Return `[B, Q] bool` all above the threshold if these are `share [B]` or more, otherwise the best `share`."""
        sure = eligible & (confidence > self.threshold)
        return torch.where((sure.sum(1) >= share)[:, None], sure, top(score, eligible, share))
