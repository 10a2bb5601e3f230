"""Self-rewarding SMC with the draws of its published code, which has one generator for tokens and ancestors."""

from dataclasses import dataclass, field, replace
from typing import Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry, Context, Meeting, Resampled, Scheduler
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.particles.smc import SelfRewarding


@dataclass(frozen=True)
class PublishedSelfRewarding(SelfRewarding):
    """Self-rewarding SMC that draws ancestors from the generator of the tokens, by weights in float32.

    Source: SR-SMC, arXiv 2602.01849. A chosen mask token counts in its row's weight, and its position is decoded again.
    It decodes one prompt.
    """

    mask_id: int | None = field(init=False, default=None)

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(super().bind(context), mask_id=context.spec.mask_id)

    @override
    def around(self, scheduler: Scheduler) -> Scheduler:
        return MaskChoices(scheduler, self.mask_id)

    @override
    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        return super().meet(replace(meeting, log_p=meeting.log_p + meeting.carry[1].view_as(meeting.log_p)), carry)

    def draw(self, meeting: Meeting, weights: Tensor, again: Tensor) -> Tensor:
        """Return `[1, N]` the ancestors of the prompt's rows, or zeros without a draw if it is not resampled."""
        if not bool(again.any()):
            return torch.zeros_like(weights, dtype=torch.int64)
        generator = cast(ReplayNoise, meeting.canvas.layout.noise).generator
        return torch.multinomial(weights[0].float(), self.count, replacement=True, generator=generator)[None]


@dataclass(frozen=True)
class MaskChoices(AroundWithState):
    """A scheduler that sums the log-probabilities of chosen mask tokens of another scheduler."""

    mask_id: int | None = None

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner carry, and the sums `[B] float64`, which are 0."""
        return super().init(canvas), torch.zeros(canvas.start.shape, dtype=torch.float64, device=canvas.start.device)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = self.inner.tell(canvas, query, readout, carry[0])
        chosen = edit.commit & (edit.ids == self.mask_id) & canvas.eligible(query.positions) & ~canvas.done[:, None]
        return edit, (inner, carry[1] + readout.confidence[:, 0].double().log().masked_fill(~chosen, 0).sum(1))


@dataclass(frozen=True)
class PrefixDraws(ReplayNoise):
    """Replayed noise of LLaDA with a prefix cache, whose draws cover the computed columns.

    Every forward but the first of a block draws as many numbers before, and discards them.
    """

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        start = 0 if opens(canvas) else first_live(canvas)
        shape = (len(canvas.ids), canvas.length - start, vocab)
        if start:
            torch.rand(shape, dtype=torch.float64, generator=self.generator)
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        return _placed(canvas, positions, start, -torch.log(-torch.log(drawn)))


@dataclass(frozen=True)
class RestDraws(ReplayNoise):
    """Replayed noise of Dream with a prefix cache: a block's first forward draws for all columns, others for masks."""

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        start = 0 if opens(canvas) else first_live(canvas)
        masked = canvas.masked[:, start:-1] if start else torch.ones_like(canvas.masked[:, :-1])
        drawn = torch.empty(int(masked.sum()), vocab).exponential_(generator=self.generator)
        noise = torch.zeros(*masked.shape, vocab)
        noise[masked] = -torch.log(drawn)
        return _placed(canvas, positions, start, noise)


def opens(canvas: Canvas) -> bool:
    """Return True if a row that is not done is in the first step of its block."""
    return bool(((canvas.age == 0) & ~canvas.done).any())


def first_live(canvas: Canvas) -> int:
    """Return the first column of the block that rows decode, which is the same for all that are not done."""
    return int(canvas.start[~canvas.done].min())


def _placed(canvas: Canvas, positions: Tensor, start: int, noise: Tensor) -> Tensor:
    """Return `[B, Q, V]` the noise at `positions [B, Q]` from that of the columns from `start` on."""
    at = (positions - start).clamp(0, noise.shape[1] - 1)
    return noise.gather(1, at[..., None].expand(-1, -1, noise.shape[2]))
