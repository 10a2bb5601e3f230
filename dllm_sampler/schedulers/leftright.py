"""Left to right: a fixed number of tokens per step, or as many as another rule accepts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import HiddenMasks, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class Leftmost(Scheduler):
    """The base of rules that commit a run of the block's leftmost masks. A subclass defines `tell`.

    Args:
        max_lookahead: columns from the first mask on that the model sees, and may commit. With None all.
    """

    max_lookahead: int | None

    def __post_init__(self) -> None:
        check_count("scheduler.max_lookahead", self.max_lookahead, optional=True)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that commits by position. A mask without a prediction would break the order."""
        facts = Traits(asks_block=False, needs_every_position=True, ranks_by_confidence=False)
        limit = self.max_lookahead
        return facts if limit is None else replace(facts, scope="model").adding(HiddenMasks(limit))

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the masks before the horizon. The model sees no mask from there on."""
        if self.max_lookahead is None:
            return Query.masks(canvas)
        horizon = self.horizon(canvas, self.max_lookahead)
        near = canvas.masked & canvas.in_block() & (canvas.columns() < horizon[:, None])
        masks = select.columns(near, min(canvas.layout.width, self.max_lookahead))
        return Query.at(canvas, masks).before(canvas, horizon)

    def draft(self, canvas: Canvas, query: Query) -> Tensor:
        """Return `[B, Q] bool` the queried positions that this step may commit."""
        eligible = canvas.eligible(query.positions)
        if self.max_lookahead is None:
            return eligible
        return eligible & (query.positions < self.horizon(canvas, self.max_lookahead)[:, None])

    @staticmethod
    def horizon(canvas: Canvas, columns: int) -> Tensor:
        """Return `[B]` the first column that is too far: `columns` from the first mask on, or the row's end."""
        return torch.minimum(canvas.frontier() + columns, canvas.end)


@dataclass(frozen=True)
class LeftToRight(Leftmost):
    """Decoding from left to right, a fixed number of masks in each forward.

        while masks remain in the block:
            token = model(canvas)
            commit the tokens_per_step leftmost masks

    Source: the baseline of APD (adaptive parallel decoding), arXiv 2506.00413.

    Args:
        max_lookahead: see `Leftmost`.
        tokens_per_step: masks per forward.
    """

    max_lookahead: int | None = None
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.tokens_per_step", self.tokens_per_step)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        draft = self.draft(canvas, query)
        return Edit(readout.token[:, 0], draft & (draft.cumsum(1) <= self.tokens_per_step)), carry
