"""Fixed schedules of LLaDA, Dream and PC-Sampler, and Fast-dLLM's factor rule, as in their published code."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import AllColumns, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import block_steps, timestep_share, uniform_share
from dllm_sampler.schedulers.factor import Factor
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.origin import Origin
from dllm_sampler.schedulers.pc import PositionCalibrated


@dataclass(frozen=True)
class PublishedFixedSteps(FixedSteps):
    """A fixed schedule that makes every planned step, even one with a share of 0 or after the last mask.

    Source: LLaDA, arXiv 2502.09992; Dream, arXiv 2508.15487. Dream's `timestep` schedule averages the masks over the
    batch, so that rows depend on each other.
    """

    @property
    def traits(self) -> Traits:
        """Traits of the schedule. All masks must be predicted, since a block is closed after its steps."""
        return replace(super().traits, needs_every_position=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        last = canvas.age + 1 >= carry[1]
        return replace(edit, keep_block=~last, close_block=last), carry

    @override
    def share(self, canvas: Canvas, masks: Tensor, steps: Tensor, left: Tensor) -> Tensor:
        if self.schedule == "uniform":
            return uniform_share(masks, steps, canvas.age)
        # Counted on the canvas: a query may not hold all masks of a finished row.
        return timestep_share(canvas.noise_left().float().mean().expand_as(left), steps, canvas.age, self.eps)


@dataclass(frozen=True)
class PublishedOrigin(Origin):
    """Dream's `origin` that makes all its steps, even after the last mask.

    Source: Dream, arXiv 2508.15487.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, steps = super().tell(canvas, query, readout, carry)
        last = canvas.age + 1 >= steps
        return replace(edit, keep_block=~last, close_block=last), steps


@dataclass(frozen=True)
class PublishedPositionCalibrated(PublishedFixedSteps, PositionCalibrated):
    """PC-Sampler (arXiv 2508.13021) that makes every planned step, as `PublishedFixedSteps`."""


@dataclass(frozen=True)
class AnyBlock(PublishedFixedSteps):
    """A fixed schedule per block whose commits may be anywhere on the canvas.

    Source: the entropy and margin baselines of PC-Sampler's repository, arXiv 2508.13021. A block's schedule counts
    the masks in it, so earlier commits in later blocks shorten theirs. Masks may then remain at the end.
    """

    @property
    def traits(self) -> Traits:
        """Traits of the schedule. It commits outside the block, too."""
        return replace(super().traits, asks_block=False).adding(AllColumns())

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Query every mask of the canvas."""
        return Query.at(canvas, select.columns(canvas.masked, canvas.layout.longest))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        masks = torch.where(canvas.age == 0, canvas.noise_left(), carry[0])  # [B]
        steps = block_steps(canvas, self.steps)
        count = uniform_share(masks, steps, canvas.age)
        commit = select.top(self.rate(canvas, query, readout), canvas.masked.gather(1, query.positions), count)
        last = canvas.age + 1 >= steps
        return Edit(readout.token[:, 0], commit, keep_block=~last, close_block=last), (masks, steps)


@dataclass(frozen=True)
class PublishedFactor(Factor):
    """Fast-dLLM's factor rule that also commits a block's last mask if all its other masks pass.

    Source: Fast-dLLM, arXiv 2505.22618.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        lacks_one = edit.commit.sum(1) == canvas.noise_left() - 1
        return replace(edit, commit=edit.commit | canvas.eligible(query.positions) & lacks_one[:, None]), carry
