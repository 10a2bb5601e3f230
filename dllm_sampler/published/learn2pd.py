"""Learn2PD's end of text as in its published code."""

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
    """An edit that marks the commits that the filter accepted. The others only ensure progress."""

    accepted: Tensor | None = None  # [B, Q] bool


@dataclass(frozen=True)
class PublishedLearnedFilter(LearnedFilter):
    """Learn2PD's scheduler whose edits mark the commits that the filter accepted, for `PublishedEndOfText`.

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
    """`EndOfText` that treats end-of-text tokens as predicted, not committed, unless the filter accepted them.

    It needs `PublishedLearnedFilter`.

    Source: Learn2PD, arXiv 2509.25188. The code requires no probability of a predicted end-of-text token.
    """

    mode: Literal["resolved", "predicted"] = "predicted"
    min_conf: float = 0.0

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        # The code looks for predicted end-of-text tokens at the masks from before the step.
        assert isinstance(edit, FilteredEdit) and edit.accepted is not None
        accepted = replace(edit, commit=edit.commit & edit.accepted)
        after = canvas.apply(query.positions, accepted)
        return replace(edit, end=super().__call__(canvas, after, query, readout, accepted).end)


@dataclass(frozen=True)
class PublishedCachedEndOfText(PublishedEndOfText):
    """`PublishedEndOfText` that considers predictions in the active block only.

    Source: the loops of Learn2PD (arXiv 2509.25188) with `cache=prefix` and `cache=dual`, also in forwards that compute
    every position.
    """

    @override
    def positions(self, canvas: Canvas) -> Tensor:
        return canvas.masked & canvas.in_block()
