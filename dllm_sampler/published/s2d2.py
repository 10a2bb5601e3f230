"""S2D2 as its code draws: at temperature 0 too."""

from __future__ import annotations

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
    """Drafts are the best tokens, and yet accepted by chance, by probabilities at temperature 1.

    Source: S2D2, arXiv 2603.25702. With `ReplayNoise` it draws as published: a uniform number for each position that a
    round verifies, then one token where one failed.
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
    """No chance: every uniform number is the same, and where a token would be drawn it is the likeliest one.

    Args:
        uniforms: that number.
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
