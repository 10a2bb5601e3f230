"""The commit rule of DAEDAL's and rho-EOS's published code, and rho-EOS's guidance and batches."""

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
    """A scheduler that commits candidates strictly above a threshold, but never the mask token.

    Source: Li-Jinsong/DAEDAL and yjyddq/rho-EOS (arXiv 2508.00819, 2601.22527). If no candidate passes, the most
    confident one that is not the mask token is committed. If all candidates are mask tokens (`compat=True`), the mask
    token's probability is set to 0, and the most confident token is committed.

    Args:
        threshold: probability that a candidate must exceed.
    """

    threshold: float = 0.9
    mask: int = field(init=False, default=-1, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """Probabilities, since the mask token may be excluded from them."""
        return frozenset({"probabilities"})

    def bind(self, context: Context) -> AboveThreshold:
        """Return a copy that knows the model's mask token."""
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
    """Classifier-free guidance that hides other columns after a change of length: all that hold tokens then.

    Source: yjyddq/rho-EOS (arXiv 2601.22527). The hidden columns are the prompt at first. They are chosen again for all
    rows whenever the length of one row changes. An object serves a single generation.
    """

    # the hidden columns `[B, L+1]`, and the rows' ends `[B]` in the last forward
    before: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @override
    def hidden(self, canvas: Canvas) -> Tensor:
        columns, end = self.before or (canvas.layout.frozen, canvas.end)
        now = torch.where((canvas.end != end).any(), ~canvas.masked, columns)
        self.before[:] = [now, canvas.end]
        return now


@dataclass(frozen=True)
class PublishedRhoEos(RhoEos):
    """rho-EOS that may change the length of a row without masks, whatever its length.

    Source: yjyddq/rho-EOS (arXiv 2601.22527). It runs in a `RestlessEngine`.
    """

    @override
    def full(self, canvas: Canvas) -> Tensor:
        return super().full(canvas) & (canvas.start < canvas.end)


class RestlessEngine(Engine):
    """An engine that ends all rows together, in the first step that leaves no mask in the batch or changes nothing.

    Until then a finished row is cut and lengthened like the others, and may get masks again. Rows of a batch therefore
    depend on each other.
    Source: yjyddq/rho-EOS (arXiv 2601.22527).
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
