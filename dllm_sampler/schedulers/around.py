"""What a scheduler around another scheduler hands on."""

from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from transformers import PreTrainedTokenizerBase

from dllm_sampler.canvas import Canvas, Query
from dllm_sampler.protocols import Blocks, Carry, Guide, ModelSpec, Scheduler


@dataclass(frozen=True)
class Around(Scheduler):
    """Everything as the inner scheduler has it; `tell` is left to the subclass."""

    inner: Scheduler

    def bind(self, spec: ModelSpec) -> Self:
        """Bind the inner scheduler."""
        return replace(self, inner=self.inner.bind(spec))

    def beside(self, blocks: Blocks, draws: bool) -> Self:
        """See `Scheduler.beside`."""
        told = copy(self)  # with what `bind` took
        object.__setattr__(told, "inner", self.inner.beside(blocks, draws))
        return told

    @property
    def whole(self) -> bool:
        """See `Scheduler.whole`."""
        return self.inner.whole

    @property
    def blind(self) -> bool:
        """See `Scheduler.blind`."""
        return self.inner.blind

    @property
    def exact(self) -> bool:
        """See `Scheduler.exact`."""
        return self.inner.exact

    @property
    def revises(self) -> bool:
        """See `Scheduler.revises`."""
        return self.inner.revises

    @property
    def by_confidence(self) -> bool:
        """See `Scheduler.by_confidence`."""
        return self.inner.by_confidence

    @property
    def drafts(self) -> bool:
        """See `Scheduler.drafts`."""
        return self.inner.drafts

    @property
    def opens_ahead(self) -> bool:
        """See `Scheduler.opens_ahead`."""
        return self.inner.opens_ahead

    @property
    def plain(self) -> bool:
        """See `Scheduler.plain`."""
        return type(self).ask is Around.ask and self.inner.plain

    @property
    def static(self) -> bool:
        """Whether the inner scheduler is."""
        return self.inner.static

    @property
    def block_length(self) -> int | None:
        """See `Scheduler.block_length`."""
        return self.inner.block_length

    @property
    def horizon(self) -> int | None:
        """See `Scheduler.horizon`."""
        return self.inner.horizon

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """See `Scheduler.guides`."""
        return self.inner.guides(given)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """See `Scheduler.check_tokenizer`."""
        self.inner.check_tokenizer(tokenizer)

    @property
    def needs(self) -> frozenset[str]:
        """Those of the inner scheduler."""
        return self.inner.needs

    def init(self, canvas: Canvas) -> Carry:
        """See `Scheduler.init`."""
        return self.inner.init(canvas)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The inner scheduler's query."""
        return self.inner.ask(canvas, carry)

    def pace(self, canvas: Canvas, seconds: float) -> int | None:
        """See `Scheduler.pace`."""
        return self.inner.pace(canvas, seconds)

    def bound(self, tokens: int) -> int:
        """See `Scheduler.bound`."""
        return self.inner.bound(tokens)
