"""A canvas that is one block of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Grid, Layout


def block(ids: Tensor, noise: Tensor, frozen: Tensor, spec: ModelSpec) -> Canvas:
    """A canvas that is one block; arguments as `BlockRule.open`'s."""
    batch, length = ids.shape

    def slot(values: Tensor, empty: int | bool) -> Tensor:
        return pad(values, (0, 1), value=empty)

    zero = torch.zeros(batch, dtype=torch.long, device=ids.device)
    start, end = frozen.long().cumprod(1).sum(1), zero + length
    return Canvas(
        ids=slot(ids, spec.pad_id),
        masked=slot(noise, False),
        start=start,
        stop=end,
        end=end,
        age=zero,
        step=zero,
        done=zero > 0,
        layout=Layout(
            frozen=slot(frozen, True),
            first=start,
            new_tokens=end,
            seeds=zero,
            lookahead=end,
            noise=CounterNoise(),
            shortest=length,
            longest=length,
            width=length,
            padded=False,
            grid=Grid(length),
        ),
    )
