"""FreeDave's drafting, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.drafting.run_ahead import Round, State
from dllm_sampler.schedulers.freedave import FreeDave


@dataclass(frozen=True)
class PublishedFreeDave(FreeDave):
    """The step after the verified state is written with the next forward; only a block's last mask is written at once.

    Source: FreeDave, arXiv 2510.00294. Drafts add the surest position, whatever the inner scheduler does. The published
    rule is `match=subset`, in block-causal models `exact`; its eager acceptance, which is not lossless, is another one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eager:
            raise UserError("options-conflict", "scheduler.eager is for scheduler=freedave. Remove it.")

    def bound(self, tokens: int) -> int:
        """See `Drafting.bound`. A forward may open a block and commit nothing."""
        return 2 * super().bound(tokens)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """See `Scheduler.ask`. What is written late must be asked even where nothing predicts it any more."""
        return replace(super().ask(canvas, carry), keeps_positions=True)

    def begin(self, canvas: Canvas, query: Query, carry: Round) -> State:
        """See `Drafting.begin`; candidate 0 is the canvas after the step that was not written yet."""
        state = super().begin(canvas, query, carry)
        if carry.readout is None:
            return state
        held = Query.at(canvas, carry.positions)
        after = self.step(super().begin(canvas, held, carry), held, carry.readout)
        confidence = torch.zeros(canvas.ids.shape, dtype=after.confidence.dtype, device=canvas.ids.device)
        confidence = confidence.scatter(1, carry.positions, after.confidence).gather(1, query.positions)
        return where_rows(carry.start == canvas.start, after._replace(confidence=confidence), state, canvas.length)

    @override
    def propose(self, state: State, query: Query, readout: Readout) -> State:
        at, sure = query.positions, readout.confidence[:, 0]
        commit = at_least_one(torch.zeros_like(sure, dtype=torch.bool), sure, state.canvas.eligible(at))
        after = state.canvas.apply(at, Edit(readout.token[:, 0], commit))
        return state._replace(canvas=after.advance(after.noise_left() == 0, self.lookahead, None))

    @override
    def commits_next(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        last = (before.noise_left() <= 1) & (after.start > before.start)
        return last & super().commits_next(canvas, before, after)

    def worth_candidate(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        """See `Drafting.worth_candidate`. Candidates may be full."""
        return before.start == canvas.start
