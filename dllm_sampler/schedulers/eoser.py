"""EOSER: lower the rank of end-of-text tokens early in decoding."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_choice, check_count, check_inner, check_number
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.spec import ChangingLength, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.fixed import FixedSteps

Progress = Literal["committed", "step", "ascending"]


@dataclass(frozen=True)
class Eoser(Around):
    """EOSER around another scheduler: end-of-text tokens lose confidence, and less so as decoding proceeds.

        while masks remain in the block:
            token, confidence = model(canvas)
            factor = low + (high - low) * progress, progress from 0 to 1
            confidence = factor * confidence where token is an end-of-text token
            commit inner(canvas, token, confidence)

    Source: EOSER, arXiv 2509.23924. Only the inner scheduler's ranking changes, no token.

    Args:
        inner: the scheduler that ranks by confidence.
        low, high: factor at the start and at the end of decoding. End-of-text tokens are held back early if low < high.
        progress: `committed` is the share of the answer that is committed before this step. `step`, as published, is
            the forward's number in its block over `steps - 1` (the paper's rule for one block only). `ascending`, as
            published with ASS, is (2^(t+1) - 1) / 2^steps in step t of the row.
        steps: the planned forwards of `step` and `ascending`.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    low: float = 0.4
    high: float = 1.0
    progress: Progress = "committed"
    steps: int | None = None
    end_ids: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        check_number("scheduler.low", self.low, finite=True)
        check_number("scheduler.high", self.high, finite=True)
        check_choice("scheduler.progress", self.progress, Progress)
        check_count("scheduler.steps", self.steps, optional=True)
        if (self.progress == "committed") != (self.steps is None):
            said = f"scheduler.progress={self.progress} needs scheduler.steps, which is not set"
            way_out = "Set scheduler.steps, or scheduler.progress=committed"
            if self.steps is not None:
                said = f"scheduler.steps={self.steps} has no effect with scheduler.progress=committed"
                way_out = "Remove it, or set scheduler.progress=step"
            raise UserError("options-conflict", f"{said}. {way_out}.")
        inner, traits = named(check_inner(self.inner)), self.inner.traits
        reasons = {
            "which drafts": traits.drafts,
            "which measures the confidence of end-of-text tokens": traits.has(ChangingLength),
            "which does not rank by confidence": not traits.ranks_by_confidence,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None:
            around = traits.drafts and isinstance(self.inner, Around)
            way_out = f"Use scheduler={inner} with scheduler.inner=eoser" if around else "Use scheduler.inner=threshold"
            raise UserError(
                "scheduler-incompatible",
                f"scheduler=eoser does not support scheduler.inner={inner}, {why}. {way_out}.",
            )

    @property
    def traits(self) -> Traits:
        """Traits of a factor that depends on the progress of the whole generation."""
        inner = super().traits
        scope = "answer" if inner.scope == "block" else inner.scope
        return replace(inner, scope=scope, scheduled=inner.scheduled or self.progress == "step")

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the end-of-text tokens, around the bound inner scheduler."""
        return with_bound_fields(super().bind(context), end_ids=context.spec.eos_ids)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        factor = (self.low + (self.high - self.low) * self._progress(canvas))[:, None, None]
        held = torch.where(is_end(readout.token, self.end_ids), readout.confidence * factor, readout.confidence)
        edit, carry = self.inner.tell(canvas, query, replace(readout, confidence=held), carry)
        return replace(edit, score=held[:, 0] if edit.score is None else edit.score), carry

    def _progress(self, canvas: Canvas) -> Tensor:
        """Return `[B]` the progress of decoding that the option `progress` names."""
        if self.steps is None:
            return canvas.progress()
        if self.progress == "ascending":
            return (2.0 ** (canvas.step + 1) - 1) / 2**self.steps
        if self.steps == 1:
            return torch.ones_like(canvas.age)
        return canvas.age.clamp(max=self.steps - 1) / (self.steps - 1)
