"""The base of schedulers that ask about forks of the canvas, and continue from the one that wins."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_count, check_inner
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Carry, Context, Scheduler
from dllm_sampler.core.spec import PlannedCommits, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.d2f import D2F
from dllm_sampler.schedulers.drafting.forks import Forks
from dllm_sampler.schedulers.drafting.run_ahead import undraftable


class Held(NamedTuple):
    """The carry of `Forking`."""

    inner: Carry
    forks: Forks


@dataclass(frozen=True)
class Forking(Around, ABC):
    """The base of schedulers that query the canvas and its forks. A subclass's `tell` chooses the winner.

    Args:
        inner: the scheduler that decides the commits.
        forks: forks of each forward. 0 is the inner scheduler itself.
    """

    inner: Scheduler = field(default_factory=D2F)
    forks: int = 2
    blocks: Blocks | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("scheduler.forks", self.forks, 0)
        why = undraftable(check_inner(self.inner).traits)
        if self.forks and why is not None:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} cannot fork for {named(self.inner)}, which {why}. Use scheduler.inner=d2f.",
            )

    @property
    @override
    def traits(self) -> Traits:
        own = super().traits
        if not self.forks:
            return own
        own = replace(own, asks_block=False, drafts=True, own_tokens=True, scope="model")
        return own.without(PlannedCommits)

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the inner scheduler's plan without forks. Returns None with forks."""
        return None if self.forks else super().ahead(canvas, carry)

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the blocks, since a fork may open other blocks than the canvas."""
        return with_bound_fields(super().bind(context), blocks=context.blocks)

    def init(self, canvas: Canvas) -> Held:
        """Return the inner scheduler's carry, and no forks."""
        return Held(super().init(canvas), Forks.none(canvas, self.forks))

    def ask(self, canvas: Canvas, carry: Held) -> Query:
        """Return the inner scheduler's query about the canvas and the forks."""
        if not self.forks:
            return super().ask(canvas, carry)
        assert self.blocks is not None
        stops = carry.forks.stops(canvas, self.blocks)
        wide = canvas if stops is None else replace(canvas, stop=stops.amax(1))
        return carry.forks.candidates(canvas, super().ask(wide, carry), stops)
