"""FreeDave's drafting, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.freedave import FreeDave
from dllm_sampler.schedulers.rows import choose
from dllm_sampler.schedulers.verifier import Held, Walked


@dataclass(frozen=True)
class PublishedFreeDave(FreeDave):
    """A certain step is written with the forward that verifies it, and only a block's last mask is written without one.

    Source: FreeDave, arXiv 2510.00294. Drafts add the surest position, whatever the inner scheduler does. The published
    rule is `match=subset`, in block-causal models `exact`; its eager acceptance, which is not lossless, is another one.
    """

    late: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eager:
            raise UserError(
                "scheduler.eager is exact, and published eager acceptance is not: use scheduler=freedave with it, or"
                " PublishedFreeDave without"
            )

    def bound(self, tokens: int) -> int:
        """See `Verifier.bound`. A forward may open a block and commit nothing."""
        return 2 * super().bound(tokens)

    def _draft(self, here: Walked, query: Query, readout: Readout) -> Walked:
        """See `Verifier._draft`."""
        at, sure = query.positions, readout.confidence[:, 0]
        commit = at_least_one(torch.zeros_like(sure, dtype=torch.bool), sure, here.state.eligible(at))
        after = here.state.apply(at, Edit(readout.token[:, 0], commit))
        return here._replace(state=after.advance(after.noise_left() == 0, self.lookahead, None))

    def _begin(self, canvas: Canvas, query: Query, carry: Held) -> Walked:
        """See `Verifier._begin`; the certain step, if it was not written yet, leads to candidate 0."""
        here = super()._begin(canvas, query, carry)
        if carry.readout is None:
            return here
        held = Query.at(canvas, carry.positions)
        there = self._step(self._stand(canvas, carry, held), held, carry.readout)
        sure = torch.zeros(canvas.ids.shape, dtype=there.sure.dtype, device=there.sure.device)
        sure = sure.scatter(1, carry.positions, there.sure).gather(1, query.positions)
        return choose(carry.start == canvas.start, there._replace(sure=sure), here, canvas.length)

    def _certain(self, canvas: Canvas, now: Canvas, then: Canvas) -> Tensor:
        """See `Verifier._certain`."""
        return super()._certain(canvas, now, then) & (now.noise_left() <= 1) & (then.start > now.start)

    def _foreseen(self, canvas: Canvas, now: Canvas, then: Canvas) -> Tensor:
        """See `Verifier._foreseen`. Branches may be full."""
        return now.start == canvas.start
