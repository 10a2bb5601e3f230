"""S2D2 with the draws of its published code."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Readout
from dllm_sampler.schedulers.s2d2 import SelfVerified


@dataclass(frozen=True)
class PublishedSelfVerified(SelfVerified):
    """S2D2 that accepts drafts at random even at temperature 0, by the probabilities at temperature 1.

    Source: S2D2, arXiv 2603.25702. With `ReplayNoise` its draws are those of the published code. Each round draws a
    uniform number for each verified position, then a token for the first position that failed, if any.
    """

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(super().bind(context), draws=True)

    @override
    def redrawn(self, readout: Readout, weight: Tensor, failed: Tensor) -> Tensor:
        assert readout.draw is not None
        noise = readout.draw.canvas.layout.noise
        if not isinstance(noise, ReplayNoise):
            return super().redrawn(readout, weight, failed)
        token, (rows, places) = torch.zeros_like(failed, dtype=torch.long), failed.nonzero(as_tuple=True)
        if len(rows):
            drawn = weight[rows, places].cpu()
            token[rows, places] = noise.pick(drawn / drawn.sum(-1, keepdim=True)).to(token.device)
        return token


@dataclass(frozen=True)
class Level(ReplayNoise):
    """Constant noise: every uniform number is `uniforms`, and drawn tokens are the likeliest ones.

    Args:
        uniforms: the uniform number, in [0, 1).
    """

    uniforms: float = 0.0

    @override
    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        return torch.full_like(positions, self.uniforms, dtype=torch.float32)

    @override
    def pick(self, weight: Tensor) -> Tensor:
        return weight.argmax(-1)

    @override
    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        return torch.zeros(len(head_rows.place), vocab, device=head_rows.place.device)
