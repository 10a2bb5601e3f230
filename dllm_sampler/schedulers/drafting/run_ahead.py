"""A scheduler run on states that may never come true."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_inner
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Carry, Context, is_random
from dllm_sampler.core.spec import (
    BlocksOpenedAhead,
    ChangingLength,
    OwnInputs,
    PlannedCommits,
    Traits,
    with_bound_fields,
)
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError


class State(NamedTuple):
    """A state that the inner scheduler reaches by itself."""

    canvas: Canvas  # `age` and `step` count the inner scheduler's steps
    inner: Carry
    candidate: Tensor  # [B] the query's candidate that holds this state
    confidence: Tensor  # [B, Q] probability of each token when the inner scheduler committed it


class Round(NamedTuple):
    """The carry: predictions at the last verified state, and the progress of the inner scheduler."""

    inner: Carry
    start: Tensor  # [B] start of the block that the predictions are for. -1: the next forward opens a block
    age: Tensor  # [B] steps of the inner scheduler in this block
    step: Tensor  # [B] steps of the inner scheduler in all
    positions: Tensor  # [B, Q]
    readout: Readout | None  # [B, 1, Q]. None before the first forward


def undraftable(traits: Traits) -> str | None:
    """Return the reason why the next steps of a scheduler with these traits cannot be drafted, or None if they can."""
    reasons = {
        "drafts too": traits.drafts,
        "remasks or replaces tokens": traits.revises,
        "changes the length of answers": traits.has(ChangingLength),
        "has inputs of its own": traits.has(OwnInputs),
        "does not ask about the active block in each step": not traits.asks_block,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class RunAhead(Around):
    """The base of schedulers that run an inner one ahead. It refuses unfit parts and makes the inner steps."""

    eager: bool = False
    mask_id: int = field(init=False, default=-1)
    lookahead: int = field(init=False, default=0)  # columns of the next block that `eager` looks at
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        inner, name, traits = named(self.inner), named(self), check_inner(self.inner).traits
        why = undraftable(traits)
        if why is not None:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={name} cannot look ahead for {inner}, which {why}. Use scheduler.inner=threshold.",
            )
        if self.eager and traits.asks == "window":
            raise UserError(
                "scheduler-incompatible",
                f"scheduler.eager=true drafts into the next block, and {inner} predicts the active block only."
                " Set scheduler.eager=false.",
            )

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler, in a rule that drafts and may commit more than it plans."""
        inner = super().traits.without(PlannedCommits)
        # It counts the inner scheduler's steps in a block.
        own = replace(inner, asks_block=False, drafts=True, scheduled=True, scope="model")
        return own.adding(BlocksOpenedAhead()) if self.eager else own

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the mask token and the block length, and knows if tokens are drawn."""
        if context.spec.mask_id is None:
            raise UserError(
                "mask-token-missing",
                f"scheduler={named(self)} needs a model with a mask token. Use scheduler=block_refine.",
            )
        blocks = context.blocks
        if self.eager and blocks.sizes_on_open:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler.eager=true opens blocks ahead, and blocks={named(blocks)} needs a forward to open one. Use"
                " blocks=fixed.",
            )
        bound = super().bind(context)
        draws = is_random(bound.guides(context.guides))
        lookahead = blocks.lookahead(2**16) if self.eager else 0
        return with_bound_fields(bound, mask_id=context.spec.mask_id, lookahead=lookahead, draws=draws)

    def ahead(self, canvas: Canvas, carry: Carry) -> None:
        """Return None, since the next commits are not known before the forward."""

    def bound(self, tokens: int) -> int:
        """Return the inner scheduler's bound."""
        return self.inner.bound(tokens)

    @override
    def init(self, canvas: Canvas) -> Round:
        if not isinstance(canvas.layout.noise, CounterNoise):
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} cannot look ahead with {type(canvas.layout.noise).__name__}. Use the"
                f" default noise.",
            )
        zero = torch.zeros_like(canvas.start)
        return Round(super().init(canvas), zero - 1, zero, zero, canvas.ids[:, :0], None)

    def begin(self, canvas: Canvas, query: Query, carry: Round) -> State:
        """Return the state of candidate 0: the canvas, with the inner scheduler's count of steps."""
        age, zero = torch.where(carry.start == canvas.start, carry.age, 0), torch.zeros_like(canvas.start)
        confidence = torch.zeros(query.positions.shape, dtype=torch.float64, device=zero.device)
        return State(replace(canvas, age=age, step=carry.step), carry.inner, zero, confidence)

    def step(self, state: State, query: Query, readout: Readout) -> State:
        """Return the state after one step of the inner scheduler, which opens the next block if it fills this one."""
        edit, inner = self.inner.tell(state.canvas, query, readout, state.inner)
        edit = replace(edit, commit=edit.commit & (edit.ids != self.mask_id))  # a chosen mask token is still noise
        after = state.canvas.apply(query.positions, edit)
        committed = (state.canvas.masked & ~after.masked).gather(1, query.positions)  # [B, Q]
        confidence = torch.where(committed, readout.confidence[:, 0], state.confidence)
        return State(after.advance(after.block_over(edit), self.lookahead, None), inner, state.candidate, confidence)
