"""Commits of the published functions of DAEDAL and rho-EOS, and rho-EOS's guidance and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.schedulers.rho_eos import RhoEos


@dataclass(frozen=True)
class AboveThreshold(Scheduler):
    """Commit above a threshold, not at it, and never the mask token, although it may be the candidate (`compat`).

    Source: Li-Jinsong/DAEDAL and yjyddq/rho-EOS (arXiv 2508.00819, 2601.22527). If nothing passes, the surest candidate
    other than the mask token is committed. If all are mask tokens, it is the surest other token, by the law without it.

    Args:
        threshold: probability.
    """

    threshold: float = 0.9
    mask: int = field(init=False, default=-1, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """Laws, since the mask token is removed from them."""
        return frozenset({"probabilities"})

    def bind(self, context: Context) -> AboveThreshold:
        """Take the mask token."""
        assert context.spec.mask_id is not None
        return with_bound_fields(self, mask=context.spec.mask_id)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        token, sure, eligible = readout.token[:, 0], readout.confidence[:, 0], canvas.eligible(query.positions)
        usable = eligible & (token != self.mask)
        chosen = usable & (sure > self.threshold)
        chosen = torch.where(chosen.any(1, keepdim=True), chosen, at_least_one(chosen, sure, usable))
        law = readout.probabilities[:, 0].index_fill(-1, torch.tensor([self.mask], device=token.device), 0)
        law = law / law.sum(-1, keepdim=True)
        behind, none = argmax(law), ~usable.any(1, keepdim=True)
        sure = law.gather(-1, behind[..., None])[..., 0].double()
        last = at_least_one(torch.zeros_like(eligible), sure, eligible)
        return Edit(torch.where(none, behind, token), torch.where(none, last, chosen)), carry


@dataclass(frozen=True)
class RenewedGuidance(GuidedDenoiser):
    """The branch without prompt masks other columns after a change of length: all that held tokens then.

    Source: yjyddq/rho-EOS (arXiv 2601.22527): the set is the prompt at first, and is made again for all rows whenever
    the length of one changes. For one generation.
    """

    before: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # `[B, L+1]`, and `[B]` ends then

    @override
    def hidden(self, canvas: Canvas) -> Tensor:
        columns, end = self.before or (canvas.layout.frozen, canvas.end)
        now = torch.where((canvas.end != end).any(), ~canvas.masked, columns)
        self.before[:] = [now, canvas.end]
        return now


@dataclass(frozen=True)
class PublishedRhoEos(RhoEos):
    """A row without anything to decode may still change in length, however long it is. For `RestlessEngine`.

    Source: yjyddq/rho-EOS (arXiv 2601.22527).
    """

    @override
    def full(self, canvas: Canvas) -> Tensor:
        return super().full(canvas) & (canvas.start < canvas.end)


class RestlessEngine(Engine):
    """Rows of a batch end together, in the first step that leaves none of them anything to decode, or changes nothing.

    Until then a finished row is cut and lengthened like the others, and may have something to decode again.
    Source: yjyddq/rho-EOS (arXiv 2601.22527), whose batches therefore depend on one another.
    """

    @override
    def run(self, canvas: Canvas, max_steps: int) -> Iterator[Generation]:
        for state in super().run(canvas, max_steps):
            yield state
            before, canvas = canvas, state.canvas
            same = torch.equal(before.end, canvas.end) and torch.equal(before.ids, canvas.ids)
            if state.finished or same:
                return
            if any(state.done):
                state.canvas = replace(canvas, done=torch.zeros_like(canvas.done))
                self.ask_and_poll(state)
