"""S2D2 for models that edit what they committed."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.s2d2 import SelfVerified


@dataclass(frozen=True)
class EditingSelfVerified(SelfVerified):
    """S2D2 for models that edit: a draft may also replace committed tokens of the block, as LLaDA2.1 does.

        while masks remain in the block, or the last round changed it:
            draft, confidence = model(canvas) at every position of the block
            replace committed tokens by others with confidence > edit
            verify the draft if policy says so, and commit, as scheduler=s2d2 does
            leave after extra rounds without a mask

    Source: S2D2 for LLaDA2.1, arXiv 2603.25702. A verification sees what was replaced, and replaces nothing. It is
    written from a description of the published code. No recorded run has this variant.

    Args:
        threshold, ...: see `SelfVerified`.
        edit: probability a different token must exceed to replace a committed one.
        extra: upper bound on the editing rounds after the last mask.
    """

    threshold: float = 0.7
    edit: float = 0.5
    extra: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.edit", self.edit, "a probability")
        check_count("scheduler.extra", self.extra, 0)

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, asks="window", revises=True)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` the number of editing rounds since the block was full, which is 0, and the carry of `s2d2`."""
        return torch.zeros_like(canvas.start), super().init(canvas)

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        return super().ask(canvas, carry[1])

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, after = super().tell(canvas, query, readout, carry[1])
        inside, eligible = canvas.inside(query.positions), canvas.eligible(query.positions)
        token, sure = readout.token[:, 0], readout.confidence[:, 0]
        edits = (inside ^ eligible) & (token != canvas.ids.gather(1, query.positions)) & (sure > self.edit)
        edits = edits & ~carry[1].waits[:, None]
        some_left = eligible.any(1)
        made = (carry[0] + 1).masked_fill(some_left, 0)
        again = (some_left | edits.any(1)) & (made < self.extra)
        # Nothing becomes noise, but stops should know that committed tokens are not final before the block is over.
        edit = replace(edit, commit=edit.commit | edits, remask=torch.zeros_like(edits), keep_block=again)
        return edit, (made, after)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. Every block may be edited after it is full."""
        return tokens * (2 + self.extra)
