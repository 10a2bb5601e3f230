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

    A subclass that changes a trait copies the inner traits: `replace(super().traits, drafts=True)`. For a rare trait it
    calls `Traits.adding` or `Traits.without`. A subclass with a carry of its own overrides `inside`.
    """

    inner: Scheduler

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler."""
        return self.inner.traits

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` that the inner scheduler needs."""
        return self.inner.needs

    def inside(self, carry: Carry) -> Carry:
        """Return the part of `carry` that belongs to the inner scheduler. The default is all of it."""
        return carry

    def bind(self, context: Context) -> Self:
        """Return a copy whose inner scheduler is bound."""
        return replace(self, inner=self.inner.bind(context))

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner scheduler's carry before the first step."""
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

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the inner scheduler's plan (`Planner.ahead`), or None if it is not a `Planner`."""
        return self.inner.ahead(canvas, self.inside(carry)) if isinstance(self.inner, Planner) else None

    def with_candidates(self, most: int) -> Self:
        """Return a copy with this limit on the inner scheduler's candidates, if that scheduler is `Paced`."""
        twin = copy(self)
        if isinstance(self.inner, Paced):
            vars(twin)["inner"] = self.inner.with_candidates(most)
        return twin

    def pace(self, made: ForwardRequest, seconds: float) -> int | None:
        """Return the inner scheduler's limit (`Paced.pace`), or None if it is not `Paced`."""
        return self.inner.pace(made, seconds) if isinstance(self.inner, Paced) else None

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """Return the guides of an inner scheduler that is `Tempered`, or else the guides `given`."""
        return self.inner.guides(given) if isinstance(self.inner, Tempered) else given


@dataclass(frozen=True)
class AroundWithState(Around):
    """A scheduler around another one whose carry is a tuple: the inner carry, and then its own state."""

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry[0]
