"""The samplers of the `dllm` library, `MDLMSampler` and `BD3LMSampler`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.schedulers.budget import equal_steps, opened_share
from dllm_sampler.schedulers.fixed import FixedSteps


@dataclass(frozen=True)
class BinomialSteps(FixedSteps):
    """Counts of a rounded schedule, drawn from binomials when a block opens. Rows wait for each other in each block.

    Source: `stochastic_transfer` of the `dllm` library's samplers. For one generation, with `ReplayNoise`.
    """

    drawn: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)  # of each row, to come

    @property
    def traits(self) -> Traits:
        """See `Scheduler.traits`."""
        return replace(super().traits, graph_safe=False)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """See `Scheduler.ask`. Counts are drawn before the tokens of the block's first forward."""
        if int(canvas.age[0]) == 0:
            steps = equal_steps(canvas, self.steps).tolist()
            rows = [self._draw(canvas, *one) for one in zip(canvas.noise_left().tolist(), steps, strict=True)]
            longest = max(map(len, rows))
            self.drawn[:] = [row + [0] * (longest - len(row)) for row in rows]
        return super().ask(canvas, carry)

    def _draw(self, canvas: Canvas, left: int, steps: int) -> list[int]:
        """The counts that are not 0 of one row's block."""
        noise, found = canvas.layout.noise, list[int]()
        assert isinstance(noise, ReplayNoise)
        shares = opened_share(torch.tensor(steps), torch.arange(steps), cosine=self.schedule == "cosine")
        for share in shares if left else ():
            number = torch.tensor(left, dtype=torch.float64)
            found.append(int(torch.binomial(number, share, generator=noise.generator)))
            left -= found[-1]
            if not left:
                break
        return [count for count in found if count]

    def count(self, canvas: Canvas, carry: Carry) -> tuple[Tensor, Carry]:
        """See `FixedSteps.count`."""
        return torch.tensor([row.pop(0) if row else 0 for row in self.drawn], device=canvas.start.device), carry

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        edit, carry = super().tell(canvas, query, readout, carry)
        return replace(edit, keep_block=torch.full_like(canvas.done, any(map(bool, self.drawn)))), carry


@dataclass(frozen=True)
class KeepsTokens(GuidedDenoiser):
    """Guidance whose branch without prompt sees some tokens of it.

    Source: `cfg_keep_tokens` of the `dllm` library's samplers.

    Args:
        tokens: token ids that both branches see.
    """

    tokens: tuple[int, ...] = ()

    def hidden(self, canvas: Canvas) -> Tensor:
        """See `GuidedDenoiser.hidden`."""
        return super().hidden(canvas) & ~torch.isin(canvas.ids, torch.tensor(self.tokens, device=canvas.ids.device))


@dataclass(frozen=True)
class RightPaddedDraws(ReplayNoise):
    """Draws that cover rows which begin at the first column, as ours do, and are padded at the right."""

    @staticmethod
    def _padded(canvas: Canvas, positions: Tensor) -> Tensor:
        return positions.clamp(max=canvas.length).cpu()
