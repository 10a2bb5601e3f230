"""The model of a decoding step, apart from the step: what it was asked, asked again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.engine import readout
from dllm_sampler.kernels.backend import TORCH, Backend
from dllm_sampler.kernels.sampling import Sampling


@dataclass
class Spy:
    """The denoiser, remembering what it was asked."""

    inner: Any
    kernels: Backend = TORCH
    last: tuple[Canvas, Query, Plan] | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        # What a recording works on is gone when it is replayed.
        if not (canvas.ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.last = canvas, query, plan
        return self.inner(canvas, query, plan)

    def again(self, given: tuple[Canvas, Query, Plan]) -> None:
        """The model alone, on what it was asked; the head as `readout.predict` has it multiplied."""
        hidden = self.inner(*given)[0]
        weight = None if self.kernels is TORCH else readout.fusable_head_weight(self.inner, hidden)
        if weight is None:
            self.inner.head(hidden)
        else:
            self.kernels.head(hidden, weight, Sampling(self.spec.mask_id))

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)

    def head_weight(self) -> Tensor | None:
        return self.inner.head_weight()
