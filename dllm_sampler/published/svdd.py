"""The sampler that SVDD's published code guides: MDLM's reverse steps, with the noise of that code."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class AbsorbingKernel(Scheduler):
    """Reverse steps of masked diffusion, in which a mask becomes a token with probability (m_t - m_s) / m_t.

    Source: MDLM, arXiv 2406.07524, as in the code of SVDD, arXiv 2408.08252. The share of masks m follows a log-linear
    schedule, at times evenly spaced from 1 to 1e-5. One more step commits the likeliest token at each remaining mask.
    All rows of a batch draw from one generator, in each step for the whole canvas.

    Args:
        steps: T, the number of steps without the last one.
        seed: seed that the published run passed to `torch.manual_seed`.
        eps: share of tokens that are not masks at time 1.
    """

    steps: int
    seed: int = 0
    eps: float = 1e-3
    generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self)["generator"] = torch.Generator().manual_seed(self.seed)

    @property
    def traits(self) -> Traits:
        """Traits of a scheduler that draws both the positions and the tokens that it commits."""
        return Traits(needs_every_position=True, ranks_by_confidence=False, draws_order=True)

    @property
    def needs(self) -> frozenset[str]:
        """Probabilities, from which tokens are drawn."""
        return frozenset({"probabilities"})

    def masks(self) -> Tensor:
        """Return `[T+1] float32` the decreasing share of masks at each time."""
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
