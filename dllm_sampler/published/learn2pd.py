"""Learn2PD's end of text, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_of_text import EndOfText


@dataclass(frozen=True)
class PublishedEndOfText(EndOfText):
    """An end token that the scheduler committed only to get on does not count as committed, but it may be guessed.

    Source: Learn2PD, arXiv 2509.25188. The code sets no bound on the probability of a guess.
    """

    mode: Literal["resolved", "predicted"] = "predicted"
    min_conf: float = 0.0

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        # The code guesses among the masks from before the step. Those that the step vouches for are no end tokens here.
        vouched = edit if edit.forced is None else replace(edit, commit=edit.commit & ~edit.forced)
        after = canvas.apply(query.positions, vouched)
        return replace(edit, end=super().__call__(canvas, after, query, readout, vouched).end)


@dataclass(frozen=True)
class PublishedCachedEndOfText(PublishedEndOfText):
    """The end of text is guessed among the masks of the active block, never after it.

    Source: the loops of Learn2PD (arXiv 2509.25188) with `cache=prefix` and `cache=dual`, also in forwards that compute
    every position.
    """

    def positions(self, canvas: Canvas) -> Tensor:
        """See `Stop.positions`."""
        return canvas.masked & canvas.in_block()
