"""Random order, known before any forward, so that a cache can look ahead."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import PlannedCommits, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import SharedSteps, even_share


@dataclass(frozen=True)
class RandomOrder(SharedSteps, Scheduler):
    """Decoding in a fixed number of steps, in a random order that is drawn before any forward.

        order = the positions of the block, shuffled
        while masks remain in the block:
            n = number of masks due in this step, by steps
            token = model(canvas) at the first n masks in order
            commit them

    Source: the random order of dKV-Cache-Greedy, arXiv 2505.15781. The distribution of orders is that of `fixed` with
    `score=random`, which draws in each step. Here the coming positions are known, so `cache=dkv_greedy` computes little
    else. Blocks share the steps in proportion to their length. Each step commits at least one position.

    Args:
        steps: forwards for the whole generation. By default one per token.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)

    @property
    @override
    def traits(self) -> Traits:
        facts = Traits(asks_block=False, needs_every_position=True, ranks_by_confidence=False, draws_order=True)
        return replace(facts, scheduled=True).adding(PlannedCommits())

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` masks and `[B]` steps of the block when it was opened, since a stop may shorten the canvas."""
        return torch.zeros_like(canvas.start), torch.zeros_like(canvas.start)

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor:
        """Return `[B, L+1]` the place of each column among this step's commits, from 1, or 0 (`Planner.ahead`)."""
        share, _ = even_share(canvas, self.steps, carry)
        noise = canvas.masked & canvas.in_block()
        turn = select.rank(self._number(canvas, canvas.columns().expand_as(noise)), noise)  # [B, L+1]
        return torch.where(noise & (turn < share[:, None]), turn + 1, 0)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the positions that this step commits."""
        most = 1  # positions of a step: a block's share of the steps is rounded, by a factor of 2 at most
        if self.steps is not None:
            most = min(canvas.layout.width, -(-2 * canvas.layout.longest // self.steps))
        return Query.at(canvas, select.columns(self.ahead(canvas, carry) > 0, most), keeps_positions=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        share, carry = even_share(canvas, self.steps, carry)
        # A stop may have joined later positions, and a block that this forward sized may have lost some.
        commit = select.top(self._number(canvas, query.positions), canvas.eligible(query.positions), share)
        return Edit(readout.token[:, 0], commit), carry

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. The first forward of a block may commit nothing if it sizes the block."""
        return 2 * tokens

    @staticmethod
    def _number(canvas: Canvas, positions: Tensor) -> Tensor:
        """Return `[B, Q]` a number of each position, the same in every step. The highest is next."""
        return replace(canvas, step=torch.zeros_like(canvas.step)).uniform(positions)
