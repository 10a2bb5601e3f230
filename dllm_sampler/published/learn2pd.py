"""Learn2PD's end of text, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.learn2pd import LearnedFilter, lay_out
from dllm_sampler.stops.end_of_text import EndOfText


@dataclass(frozen=True)
class FilteredEdit(Edit):
    """An edit that names the commits of the filter's choice: the others are made only to make progress."""

    accepted: Tensor | None = None  # [B, Q] bool


@dataclass(frozen=True)
class PublishedLearnedFilter(LearnedFilter):
    """The same rule, which says in its edits what the filter accepted. `PublishedEndOfText` needs to know.

    Source: Learn2PD, arXiv 2509.25188.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, (plan, known) = super().tell(canvas, query, readout, carry)
        _, offset = lay_out(canvas, query.positions, readout.confidence[:, 0], known)
        values = {one.name: getattr(edit, one.name) for one in fields(edit)}
        return FilteredEdit(**values, accepted=edit.commit & self.accepts(known, offset)), (plan, known)


@dataclass(frozen=True)
class PublishedEndOfText(EndOfText):
    """An end token that the filter did not accept does not count as committed, but it may be guessed.

    Needs `PublishedLearnedFilter`.

    Source: Learn2PD, arXiv 2509.25188. The code sets no bound on the probability of a guess.
    """

    mode: Literal["resolved", "predicted"] = "predicted"
    min_conf: float = 0.0

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        # The code guesses among the masks from before the step. Accepted ones that are left are not end tokens.
        assert isinstance(edit, FilteredEdit) and edit.accepted is not None
        accepted = replace(edit, commit=edit.commit & edit.accepted)
        after = canvas.apply(query.positions, accepted)
        return replace(edit, end=super().__call__(canvas, after, query, readout, accepted).end)


@dataclass(frozen=True)
class PublishedCachedEndOfText(PublishedEndOfText):
    """The end of text is guessed among the masks of the active block, never after it.

    Source: the loops of Learn2PD (arXiv 2509.25188) with `cache=prefix` and `cache=dual`, also in forwards that compute
    every position.
    """

    @override
    def positions(self, canvas: Canvas) -> Tensor:
        return canvas.masked & canvas.in_block()
