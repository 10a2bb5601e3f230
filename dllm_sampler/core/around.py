"""The base of schedulers around another scheduler."""

from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import Carry, Context, Guide, Paced, Planner, Scheduler, Tempered
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Query


@dataclass(frozen=True)
class Around(Scheduler):
    """A scheduler that passes everything on to the inner one. A subclass defines `tell`.

    A subclass that changes a trait derives its own: `replace(super().traits, drafts=True)`, and `adding` or `without`
    for rare ones. A subclass whose carry holds more than the inner scheduler's overrides `inside`, which returns that
    part.
    """

    inner: Scheduler

    @property
    def traits(self) -> Traits:
        """Those of the inner scheduler."""
        return self.inner.traits

    @property
    def needs(self) -> frozenset[str]:
        """Those of the inner scheduler."""
        return self.inner.needs

    def inside(self, carry: Carry) -> Carry:
        """Return the inner scheduler's part of this one's carry; default: all of it."""
        return carry

    def bind(self, context: Context) -> Self:
        """Bind the inner scheduler."""
        return replace(self, inner=self.inner.bind(context))

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner scheduler's carry."""
        return self.inner.init(canvas)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the inner scheduler's query."""
        return self.inner.ask(canvas, self.inside(carry))

    @override
    def bound(self, tokens: int) -> int:
        return self.inner.bound(tokens)

    @property
    @override
    def total_steps(self) -> int | None:
        return self.inner.total_steps

    @property
    @override
    def added_steps(self) -> int:
        return self.inner.added_steps

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """See `Planner.ahead`. Returns None if the inner scheduler is not a planner."""
        return self.inner.ahead(canvas, self.inside(carry)) if isinstance(self.inner, Planner) else None

    def with_candidates(self, most: int) -> Self:
        """See `Paced.with_candidates`."""
        twin = copy(self)
        if isinstance(self.inner, Paced):
            vars(twin)["inner"] = self.inner.with_candidates(most)
        return twin

    def pace(self, made: ForwardRequest, seconds: float) -> int | None:
        """See `Paced.pace`."""
        return self.inner.pace(made, seconds) if isinstance(self.inner, Paced) else None

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """See `Tempered.guides`."""
        return self.inner.guides(given) if isinstance(self.inner, Tempered) else given
