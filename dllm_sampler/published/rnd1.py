"""RND1's `diffusion_sample`."""

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
    """A fixed schedule as `schedule=even` that also makes the forwards of steps without commits.

    Source: RND1's `diffusion_sample`. With a temperature, the random numbers of such a forward are drawn, too.
    """

    @property
    def traits(self) -> Traits:
        """Traits of the base class. Committed mask tokens stay committed."""
        return super().traits.adding(CommittedMasks())

    @override
    def share(self, canvas: Canvas, masks: Tensor, steps: Tensor, left: Tensor) -> Tensor:
        return left - even_rest(masks, steps, (canvas.age + 1).minimum(steps))


@dataclass(frozen=True)
class CappedEntropyBound(EntropyBound):
    """An entropy bound that commits all remaining masks of a block in its last of `steps` forwards.

    Source: RND1's `diffusion_sample` with `eb_gamma`.
    """

    steps: int = 256

    @property
    def traits(self) -> Traits:
        """Traits of the base class. Committed mask tokens stay committed."""
        return super().traits.adding(CommittedMasks())

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        last = (canvas.age + 1 >= self.steps)[:, None]
        return replace(edit, commit=edit.commit | last & canvas.eligible(query.positions)), carry


@dataclass(frozen=True)
class JudgedTemperature(Guide):
    """A temperature that changes entropies and confidences, while tokens stay the likeliest ones.

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
    """Replayed noise whose draws cover all rows of the output. Row i is for position i + 1."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        drawn = torch.empty(canvas.length, vocab).exponential_(generator=self.generator)
        return -torch.log(drawn)[(positions - 1).clamp(0, canvas.length - 1).cpu()].to(positions.device)
