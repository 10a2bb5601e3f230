"""The samplers of the `dllm` library, `MDLMSampler` and `BD3LMSampler`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.packing import Pack
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.schedulers.budget import equal_steps, opened_share
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.stops.end_tokens import BlockStop, with_finish


@dataclass(frozen=True)
class BinomialSteps(FixedSteps):
    """Counts of a rounded schedule, drawn from binomials when a block opens. Rows wait for each other in each block.

    Source: `stochastic_transfer` of the `dllm` library's samplers. For one generation, with `ReplayNoise`.
    """

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, graph_safe=False)

    def init(self, canvas: Canvas) -> Carry:
        """`[B, S]` the counts of the block's steps to come."""
        return self._drawn(canvas, canvas.start, canvas.stop)

    @override
    def count(self, canvas: Canvas, carry: Carry) -> tuple[Tensor, Carry]:
        return carry[:, 0], torch.cat([carry[:, 1:], torch.zeros_like(carry[:, :1])], 1)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`. The last step of a block draws the counts of the next."""
        edit, carry = super().tell(canvas, query, readout, carry)
        waits = bool(carry.any())
        if not waits and bool((query.positions < canvas.length).any()):
            carry = self._drawn(canvas, canvas.stop, canvas.block_end(canvas.stop, canvas.layout.lookahead))
        return replace(edit, keep_block=torch.full_like(canvas.done, waits)), carry

    def _drawn(self, canvas: Canvas, start: Tensor, stop: Tensor) -> Tensor:
        """Draw `[B, S]` the counts of blocks from `start [B]` to `stop [B]`, row by row."""
        noise, steps = canvas.layout.noise, equal_steps(canvas, self.steps).tolist()
        assert isinstance(noise, ReplayNoise)
        found = torch.zeros(len(steps), max(steps), dtype=torch.long)
        for row, left in enumerate((stop - start).tolist()):
            at, total = torch.arange(steps[row]), torch.tensor(steps[row])
            counts = []
            for share in opened_share(total, at, cosine=self.schedule == "cosine") if left else ():
                number = torch.tensor(left, dtype=torch.float64)
                counts.append(int(torch.binomial(number, share, generator=noise.generator)))
                left -= counts[-1]
                if not left:
                    break
            counts = [count for count in counts if count]
            found[row, : len(counts)] = torch.tensor(counts, dtype=torch.long)
        return found.to(canvas.ids.device)


@dataclass(frozen=True)
class KeepsTokens(GuidedDenoiser):
    """Guidance whose branch without prompt sees some tokens of it.

    Source: `cfg_keep_tokens` of the `dllm` library's samplers.

    Args:
        tokens: token ids that both branches see.
    """

    tokens: tuple[int, ...] = ()

    @override
    def hidden(self, canvas: Canvas) -> Tensor:
        return super().hidden(canvas) & ~torch.isin(canvas.ids, torch.tensor(self.tokens, device=canvas.ids.device))


@dataclass(frozen=True)
class RightPaddedDraws(ReplayNoise):
    """Draws that cover rows which begin at the first column, as ours do, and are padded at the right."""

    @staticmethod
    def _padded(canvas: Canvas, positions: Tensor) -> Tensor:
        return positions.clamp(max=canvas.length).cpu()


@dataclass(frozen=True)
class StopTogether(BlockStop):
    """End all rows of a batch once each has an end token in a finished block. No forward stores the last block.

    Source: `BD3LMSampler`, whose rows are in the same step of their blocks. Until then finished rows go on.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        full, last = (after.noise_left() == 0).all(), (canvas.stop >= canvas.end).all()
        return with_finish(edit, (full & (last | self.ends(after).any(1).all())).expand_as(canvas.done))


@dataclass(frozen=True)
class HidesPads(Around):
    """Padding tokens before the block are hidden, those that the model wrote, too.

    Source: `BD3LMSampler`, which takes them for its own padding. For `HiddenUncounted`.

    Args:
        inner: the scheduler.
        pad: the padding token.
    """

    pad: int = -1

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        # A forward that stores a full block is one of the text before the next.
        before = torch.where(canvas.noise_left() == 0, canvas.stop, canvas.start)
        hidden = (canvas.ids == self.pad) & (canvas.columns() < before[:, None])
        return replace(super().ask(canvas, carry), hidden=hidden)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        return self.inner.tell(canvas, query, readout, carry)


@dataclass(frozen=True)
class HiddenUncounted(TransformerDenoiser):
    """A model whose rotary positions do not count hidden columns.

    Source: `BD3LMSampler`.
    """

    @override
    def positions(self, query: Query, pack: Pack) -> Tensor:
        assert query.hidden is not None
        return pack.column - (query.hidden.cumsum(1) - query.hidden.long())[pack.row, pack.column]
