"""RCR: every forward decides again which tokens of the block to keep."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.remasking import Remasking


@dataclass(frozen=True)
class RunningConfidence(Remasking):
    """Running-confidence remasking: each forward decides again which tokens of the block to keep.

        for i = 1 ... T, the block's part of steps:
            token, confidence = model(canvas)
            commit all masks, and record their confidence
            keep = ceil(length of the block * i / T)
            remask all positions of the block but the keep with the highest record

    Source: RCR, arXiv 2508.13148, as in ParallelBench, arXiv 2510.04767.

    Args:
        steps: forwards for the whole generation. A block takes one per position at most, which is the default.
    """

    steps: int | None = None

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at = query.positions
        reach = (at >= self.first(canvas)) & (at < canvas.stop[:, None])  # [B, Q]
        noise = reach & canvas.masked.gather(1, at)
        sure = torch.where(noise, readout.confidence[:, 0], carry.gather(1, at))
        missing, keep_block = self.missing(canvas)
        drop = top(-sure, reach & (sure < torch.inf), missing)
        still = drop & noise
        return Edit(readout.token[:, 0], noise ^ still, drop ^ still, keep_block=keep_block), carry.scatter(1, at, sure)

    def first(self, canvas: Canvas) -> Tensor:
        """Return `[B, 1]` the first column that may be remasked, which is the block's first one."""
        return canvas.start[:, None]

    def missing(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Return `[B]` the number of positions that the step leaves as noise, and `[B] bool` rows with any."""
        length, steps = self.block(canvas)
        missing = length * (steps - canvas.age - 1) // steps
        return missing, missing > 0
