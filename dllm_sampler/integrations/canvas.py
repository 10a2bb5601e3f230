"""A canvas that is one block of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Sizes


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
        frozen=slot(frozen, True),
        first=start,
        end=end,
        start=start,
        stop=end,
        age=zero,
        step=zero,
        done=zero > 0,
        nfe=zero,
        computed=zero,
        row_seed=zero,
        new_tokens=end,
        shortest=length,
        longest=length,
        padded=False,
        sizes=Sizes(length, length, batch * length, batch * length, length, whole=True),
        noise=CounterNoise(),
        lookahead=end,
        width=length,
        grid=length,
    )
