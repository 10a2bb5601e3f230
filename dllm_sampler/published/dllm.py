"""The samplers of the `dllm` library, `MDLMSampler` and `BD3LMSampler`."""

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
    """A fixed schedule whose commits per step are drawn from binomials when a block opens.

    Source: `stochastic_transfer` of the `dllm` library's samplers. All rows of a batch close a block in the same step.
    It needs `ReplayNoise`.
    """

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, graph_safe=False)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B, S]` the number of commits in each step of the first block."""
        return self._drawn(canvas, canvas.start, canvas.stop)

    @override
    def count(self, canvas: Canvas, carry: Carry) -> tuple[Tensor, Carry]:
        return carry[:, 0], torch.cat([carry[:, 1:], torch.zeros_like(carry[:, :1])], 1)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Commit by the counts that were drawn. The last step of a block draws those of the next block."""
        edit, carry = super().tell(canvas, query, readout, carry)
        waits = bool(carry.any())
        if not waits and bool((query.positions < canvas.length).any()):
            carry = self._drawn(canvas, canvas.stop, canvas.block_end(canvas.stop, canvas.layout.lookahead))
        return replace(edit, keep_block=torch.full_like(canvas.done, waits)), carry

    def _drawn(self, canvas: Canvas, start: Tensor, stop: Tensor) -> Tensor:
        """Return `[B, S]` random numbers of commits per step for blocks from `start [B]` to `stop [B]`."""
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
    """Classifier-free guidance whose branch without a prompt still sees some of the prompt's tokens.

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
    """Replayed noise for published loops that pad rows on the right, so that columns equal those of the canvas."""

    @staticmethod
    def _padded(canvas: Canvas, positions: Tensor) -> Tensor:
        return positions.clamp(max=canvas.length).cpu()


@dataclass(frozen=True)
class StopTogether(BlockStop):
    """A stop that ends all rows of a batch together, once their blocks are full and each row has an end-of-text token.

    Source: `BD3LMSampler`. A row with an end-of-text token continues until the others have one. Rows also end when
    their last block is full, without a forward that stores it.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        full, last = (after.noise_left() == 0).all(), (canvas.stop >= canvas.end).all()
        return with_finish(edit, (full & (last | self.ends(after).any(1).all())).expand_as(canvas.done))


@dataclass(frozen=True)
class HidesPads(Around):
    """A scheduler whose queries hide padding tokens before the block, even those that the model generated.

    Source: `BD3LMSampler`, which cannot distinguish them from its own padding. Its model is `HiddenUncounted`.

    Args:
        inner: the scheduler that commits.
        pad: id of the padding token.
    """

    pad: int = -1

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        # A forward that stores a full block computes the text before the next block.
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
