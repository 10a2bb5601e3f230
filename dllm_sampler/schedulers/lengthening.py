"""The base of schedulers around another one that change answers' lengths by the probability of end-of-text tokens."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_count, check_inner
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.spec import ChangingLength, HiddenMasks, PlannedCommits, Traits, with_bound_fields
from dllm_sampler.core.statistics import argmax, significant
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class Lengthening(Around):
    """A scheduler that commits as the inner one does, and queries the rest of the answer too.

    After a change of length blocks open again: schedules and histories restart, and caches refresh. The noise of a
    column stays with it.

    Args:
        inner: the scheduler that decides the commits.
        initial: columns that an answer begins with, after the given ones.
        expand: columns of one expansion.
        eos_tokens: number of predicted end-of-text tokens in the signal.
    """

    inner: Scheduler = field(default_factory=Threshold)
    initial: int = 64
    expand: int = 8
    eos_tokens: int = 32
    end_ids: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)
    mask: int = field(init=False, default=-1, repr=False, compare=False)
    draws: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("initial", "expand", "eos_tokens"):
            check_count(f"scheduler.{name}", getattr(self, name))
        traits = check_inner(self.inner).traits
        reasons = {
            "drafts tokens": traits.drafts,
            "remasks or replaces tokens": traits.revises,
            "changes the length of answers, too": traits.has(ChangingLength),
            "hides masks from the model": traits.has(HiddenMasks),
            "counts steps or tokens over the whole answer": traits.scope == "answer",
            "needs more of the model than the logits of one block": traits.scope == "model",
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} does not support scheduler.inner={named(self.inner)}, which {why}. Use"
                " scheduler.inner=threshold.",
            )

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler, in a rule that queries the whole answer and changes its length."""
        facts = replace(super().traits, asks_block=False, scope="model").without(PlannedCommits)
        return facts.adding(ChangingLength(self.initial))

    @property
    def needs(self) -> frozenset[str]:
        """Fields that the inner scheduler needs, and probabilities to find the best token if tokens are drawn."""
        return super().needs | {"probabilities"} if self.draws else super().needs

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the end-of-text tokens and the mask token."""
        spec = context.spec
        mask = spec.pad_id if spec.mask_id is None else spec.mask_id  # without a mask token it is refused
        return with_bound_fields(super().bind(context), end_ids=spec.eos_ids, mask=mask, draws=context.draws)

    def inside(self, carry: Carry) -> Carry:
        """Return the inner scheduler's carry, which is after the rule's own state."""
        return carry[1]

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query with every column of the answer added, also committed ones."""
        first = canvas.layout.given_end
        answer = canvas.seen() & (canvas.columns() >= first[:, None])
        return super().ask(canvas, carry).join(canvas, answer, canvas.layout.longest)

    def ahead(self, canvas: Canvas, carry: Carry) -> None:
        """Return None, since insertions are not known before the forward."""

    def ends(self, canvas: Canvas, query: Query, readout: Readout) -> tuple[Tensor, Tensor]:
        """Return `[B, Q] bool` positions whose best token is an end-of-text token, and `[B, Q]` its probability."""
        token, sure = readout.token[:, 0], readout.confidence[:, 0]
        if readout.probabilities is not None:
            token = argmax(readout.probabilities[:, 0])
            sure = readout.probabilities[:, 0].gather(-1, token[..., None])[..., 0].double()
        return is_end(token, self.end_ids) & (sure > 0) & (query.positions < canvas.end[:, None]), sure

    def signal(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """Return `[B] float64` the mean probability of the last `eos_tokens` such tokens. Missing ones count as 0."""
        ends, sure = self.ends(canvas, query, readout)
        last = ends.flip(1).cumsum(1).flip(1) <= self.eos_tokens
        # A sum has these digits in any order, so a row's signal is the same in every batch.
        return significant(torch.where(ends & last, sure, 0).sum(1), torch.float64) / self.eos_tokens
