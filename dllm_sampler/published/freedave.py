"""FreeDave's drafting as in its published code."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.drafting.scheduler import Round, State
from dllm_sampler.schedulers.freedave import FreeDave


@dataclass(frozen=True)
class PublishedFreeDave(FreeDave):
    """FreeDave that commits the step after the verified state only with the next forward.

    Source: FreeDave, arXiv 2510.00294. Only a block's last mask is committed at once. Drafts add the most confident
    position, whatever the inner scheduler does. The published rule is `match=subset`, and `exact` in block-causal
    models. The published eager acceptance, which is not lossless, is not supported.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eager:
            raise UserError("options-conflict", "scheduler.eager=true does not work with PublishedFreeDave. Remove it.")

    def bound(self, tokens: int) -> int:
        """Return twice the bound of FreeDave, since the forward that opens a block may commit nothing."""
        return 2 * super().bound(tokens)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return FreeDave's query. It keeps positions that the forward no longer predicts, for the late commits."""
        return replace(super().ask(canvas, carry), keeps_positions=True)

    def begin(self, canvas: Canvas, query: Query, carry: Round) -> State:
        """Return the state of a round. Its candidate 0 is the canvas after the step that is not committed yet."""
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
        """Return `[B] bool` rows whose state `before` is in this block. Candidate `after` may be full."""
        return before.start == canvas.start
