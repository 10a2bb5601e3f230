"""Dream's `origin`: every mask is opened by chance, at the rate of the diffusion process."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import SharedSteps, block_steps, check_eps, timestep_odds


@dataclass(frozen=True)
class Origin(SharedSteps, Scheduler):
    """Dream's `origin`: every mask is opened by chance, at the rate of the diffusion process.

        for each of the block's steps, from time t to s, evenly from 1 to eps:
            open each mask with probability 1 - s / t, in the last step all
            token = model(canvas) at the opened masks
            commit them

    Source: Dream, arXiv 2508.15487 (`alg=origin`). A step may open none. It is published with `blocks=full`. Other
    blocks share the steps by length.

    Args:
        steps: forwards for the whole generation. By default one per position.
        eps: time at which the timestep schedule ends.
    """

    steps: int | None = None
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)
        check_eps(self.eps)

    @property
    @override
    def traits(self) -> Traits:
        facts = Traits(asks_block=False, needs_every_position=True, ranks_by_confidence=False, draws_order=True)
        return replace(facts, scheduled=True)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` steps of the block when it was opened, since a stop may shorten the canvas later."""
        return torch.zeros_like(canvas.start)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the masks that chance opens in this step."""
        asked = select.columns(canvas.masked & canvas.in_block(), canvas.layout.width)  # [B, Q]
        odds = timestep_odds(self._steps(canvas, carry), canvas.age, self.eps)[:, None]
        opened = (canvas.uniform(asked) < odds) & (asked < canvas.length)
        return Query.at(canvas, torch.where(opened, asked, canvas.length).sort(1).values, keeps_positions=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        return Edit(readout.token[:, 0], canvas.eligible(query.positions)), self._steps(canvas, carry)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. The first forward of a block may open nothing if it sizes the block."""
        return max(tokens, self.steps or 0) + tokens

    def _steps(self, canvas: Canvas, carry: Carry) -> Tensor:
        return torch.where(canvas.age == 0, block_steps(canvas, self.steps), carry)
