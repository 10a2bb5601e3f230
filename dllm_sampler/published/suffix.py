"""The random numbers of DPad's published code."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class SuffixDraws(ReplayNoise):
    """Replayed noise that draws once when a block opens, to choose the columns after the block that stay visible.

    Source: DPad, arXiv 2508.14148. It serves one row at temperature 0. The draw is a uniform number for each later
    column, or a random order of the queried columns.
    """

    @override
    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        out = torch.ones(1, canvas.length + 1)
        if int(canvas.age) == 0:
            stop, end = int(canvas.stop), int(canvas.end)
            out[:, stop:end] = torch.rand(max(0, end - stop), generator=self.generator)
        return out.gather(1, positions.cpu()).to(positions.device)

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """Return `[1, Q]` numbers that rank the queried positions randomly if a block opens, else zeros."""
        out, asked = torch.zeros(positions.shape), (positions < canvas.length).cpu()
        if int(canvas.age) == 0 and int(count) > 0:
            drawn = torch.randperm(int(asked.sum()), generator=self.generator)
            out[asked] = -drawn.argsort().float()
        return out.to(positions.device)
