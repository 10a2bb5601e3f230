"""RND1's `diffusion_sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Carry, Guide
from dllm_sampler.core.spec import CommittedMasks, Traits
from dllm_sampler.core.statistics import tempered
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import even_rest
from dllm_sampler.schedulers.entropy_bound import EntropyBound
from dllm_sampler.schedulers.fixed import FixedSteps


@dataclass(frozen=True)
class EvenRest(FixedSteps):
    """The schedule `even` with the steps that have nothing to commit: they make a forward.

    Source: RND1's `diffusion_sample`. Under a temperature such a forward draws other candidates.
    """

    @property
    def traits(self) -> Traits:
        """See `Scheduler.traits`. It goes by what it has opened, and not by the tokens there."""
        return super().traits.adding(CommittedMasks())

    @override
    def share(self, canvas: Canvas, masks: Tensor, steps: Tensor, left: Tensor) -> Tensor:
        return left - even_rest(masks, steps, (canvas.age + 1).minimum(steps))


@dataclass(frozen=True)
class CappedEntropyBound(EntropyBound):
    """Commit all that is left in the last of `steps` forwards.

    Source: RND1's `diffusion_sample` with `eb_gamma`.
    """

    steps: int = 256

    @property
    def traits(self) -> Traits:
        """See `Scheduler.traits`. It goes by what it has opened, and not by the tokens there."""
        return super().traits.adding(CommittedMasks())

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        last = (canvas.age + 1 >= self.steps)[:, None]
        return replace(edit, commit=edit.commit | last & canvas.eligible(query.positions)), carry


@dataclass(frozen=True)
class JudgedTemperature(Guide):
    """Entropies and confidences of the tempered law for the likeliest tokens, which no one draws.

    Source: RND1's `diffusion_sample` with `greedy=True`.

    Args:
        value: the temperature.
    """

    keeps_excluded: ClassVar[bool] = True

    value: float

    @property
    @override
    def chooses(self) -> bool:
        return False

    @property
    @override
    def measures(self) -> bool:
        return True

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return tempered(logits, self.value)


@dataclass(frozen=True)
class ShiftedDraws(ReplayNoise):
    """Draws that cover every row of the network's output; row i is for the position i + 1."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        drawn = torch.empty(canvas.length, vocab).exponential_(generator=self.generator)
        return -torch.log(drawn)[(positions - 1).clamp(0, canvas.length - 1).cpu()].to(positions.device)
