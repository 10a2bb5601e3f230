"""The sampler that SVDD's code guides: MDLM's kernel on masks, with the code's noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class AbsorbingKernel(Scheduler):
    """Reverse steps of masked diffusion: a mask becomes a token with probability (m_t - m_s) / m_t, else it stays.

    Source: MDLM, arXiv 2406.07524, as in the code of SVDD, arXiv 2408.08252. m is the share of masks under a log-linear
    schedule, at times evenly spaced from 1 to 1e-5. One more step fills what is left with the best tokens. All rows of
    a batch draw from one generator, numbers for the whole canvas each time.

    Args:
        steps: T, without the last one.
        seed: what the code gave to `torch.manual_seed`.
        eps: what the schedule leaves unmasked at time 1.
    """

    steps: int
    seed: int = 0
    eps: float = 1e-3
    generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self)["generator"] = torch.Generator().manual_seed(self.seed)

    @property
    def traits(self) -> Traits:
        """Chance decides which positions, and which tokens."""
        return Traits(needs_every_position=True, ranks_by_confidence=False, draws_order=True)

    @property
    def needs(self) -> frozenset[str]:
        """The whole distribution, to draw from."""
        return frozenset({"probabilities"})

    def masks(self) -> Tensor:
        """`[T+1] float32` the share of masks at each time, falling."""
        times = torch.linspace(1, 1e-5, self.steps + 1)
        return 1 - torch.exp(torch.log1p(-(1 - self.eps) * times))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        law, eligible = readout.probabilities[:, 0], canvas.eligible(query.positions)  # [B, Q, V]
        mask = law.shape[-1] - 1
        last = (canvas.step >= self.steps)[:, None]  # [B, 1]
        share, step = self.masks(), canvas.step.clamp(max=self.steps - 1)
        now, then = share[step][:, None, None], share[step + 1][:, None, None]  # [B, 1, 1]
        weight = torch.cat([law[..., :mask] * (now - then), then.expand(*law.shape[:2], 1)], -1)
        place = (query.positions - canvas.layout.first[:, None]).clamp(max=canvas.layout.longest - 1)
        drawn = torch.rand(len(law), canvas.layout.longest, mask + 1, generator=self.generator)
        noise = 1e-10 - (drawn.gather(1, place[..., None].expand_as(law)) + 1e-10).log()
        ids = torch.where(last, law.argmax(-1), (weight / noise).argmax(-1))
        return Edit(ids, eligible & (ids != mask)), carry

    @override
    def bound(self, tokens: int) -> int:
        return self.steps + 1
