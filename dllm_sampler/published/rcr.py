"""RCR as in ParallelBench's code."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import AllColumns, Traits
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.schedulers.budget import block_steps
from dllm_sampler.schedulers.rcr import RunningConfidence


@dataclass(frozen=True)
class PublishedRunningConfidence(RunningConfidence):
    """RCR that may also remask tokens of earlier blocks, whose confidences it remembers.

    Source: RCR as in ParallelBench, arXiv 2510.04767. Every planned step is made. The number of remasked positions is
    rounded down in floating point, so rounding errors may keep one more token. It needs `cache=none`.
    """

    @property
    def traits(self) -> Traits:
        """Traits of RCR. It queries and writes earlier blocks, too."""
        return super().traits.adding(AllColumns())

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Query all positions of the answer before the block's end."""
        columns = canvas.requested()
        return Query.at(canvas, torch.where(columns < canvas.stop[:, None], columns, canvas.length))

    @override
    def first(self, canvas: Canvas) -> Tensor:
        return canvas.layout.first[:, None]

    @override
    def missing(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        steps = block_steps(canvas, self.steps)
        length = (canvas.stop - canvas.start).clamp(min=1)
        missing = (length * (1 - (canvas.age + 1).double() / steps)).long().clamp(min=0)
        return missing, canvas.age + 1 < steps

    @override
    def bound(self, tokens: int) -> int:
        return max(tokens, self.steps or 0)
