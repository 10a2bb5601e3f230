"""The base of schedulers that remask tokens by a record of confidences."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.schedulers.budget import SharedSteps, block_steps


@dataclass(frozen=True)
class Remasking(SharedSteps, Scheduler):
    """A fixed schedule over whole blocks, with a record of the confidence at which each token was committed."""

    steps: int | None

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(asks_block=False, needs_every_position=True, revises=True)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B, L+1]` confidence at commit. It is infinite where nothing is recorded."""
        return torch.full(canvas.ids.shape, torch.inf, dtype=torch.float64, device=canvas.ids.device)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the whole block. A cache need not predict committed positions."""
        return replace(Query.window(canvas), keeps_positions=True)

    def block(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Return `[B]` the positions of the block, and `[B]` the steps that it may take, at most one per position."""
        length = canvas.free_in_block().clamp(min=1)
        if self.steps is None:
            return length, length
        return length, torch.minimum(block_steps(canvas, self.steps), length)
