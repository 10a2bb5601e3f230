"""Self-rewarding sequential Monte Carlo: rows with more probable tokens are copied."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Meeting, Resampled
from dllm_sampler.core.values import Canvas
from dllm_sampler.particles.resampling import Resampling


@dataclass(frozen=True)
class SelfRewarding(Resampling):
    """Rows weighted by the probability of the tokens that they committed since the last resampling.

    Source: SR-SMC, arXiv 2602.01849. When all rows have closed a block, also the last one, and the effective number of
    rows is below `ess * count`, rows are resampled with replacement. The answer is the row with the highest
    probability of all its tokens. Probabilities are those that schedulers judge, before the temperature. Two rows with
    `ess=0.5` are never resampled, since their effective number is at least 1. Then the answer is the better of both.
    """

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B] float64` the log-probability of each row at its last resampling, 0 before the first step."""
        return torch.zeros(canvas.start.shape, dtype=torch.float64, device=canvas.start.device)

    @override
    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        before: Tensor = carry
        gained = meeting.log_p - before.view_as(meeting.log_p)
        ancestors = self.ancestors(meeting, gained)
        return Resampled(gained, ancestors, torch.where(ancestors.flatten() < 0, before, meeting.log_p.flatten()))
