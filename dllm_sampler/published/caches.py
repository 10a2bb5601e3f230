"""dKV-Cache and Elastic-Cache, as their code has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.dkv import DelayedCache
from dllm_sampler.cache.elastic import ElasticCache, ElasticPlan
from dllm_sampler.core.values import Canvas


@dataclass
class PublishedDelayedCache(DelayedCache):
    """Under a logit shift the canvas's last row, which predicts nothing, is kept by the rule of another row.

    Source: dKV-Cache's Dream path, arXiv 2505.15781. It counts as committed from the second forward on (`un`), or when
    the row before it is kept (`un_right`).
    """

    @override
    def _unneeded(self, canvas: Canvas, text: Tensor) -> Tensor:
        if not self.spec.shift:
            return text
        last = canvas.columns() == canvas.end[:, None] - 1
        successor = text.roll(-1, 1)
        if self.shift == "un":
            return torch.where(last, (canvas.step > 0)[:, None], successor)
        both = text & successor
        return torch.where(last, both.roll(1, 1), both)


@dataclass
class PublishedElasticCache(ElasticCache):
    """Attention maps are compared over heads: for each key the cosine over heads, averaged over keys.

    Source: the code of Elastic-Cache, arXiv 2510.14973.
    """

    @override
    def similarity(self, before: Tensor, now: Tensor, plan: ElasticPlan) -> Tensor:
        real = (plan.tracked < plan.chosen.shape[1] - 1).double()  # [B, T]
        before, now = (a.to(torch.promote_types(a.dtype, torch.float32)) for a in (before, now))
        alike = F.cosine_similarity(before, now, dim=1).double() * real[..., None]  # [B, T, S], 0 at unseen keys
        seen = plan.known.new_ones(alike.shape[::2]) if plan.keys is None else plan.keys
        return alike.sum((1, 2)) / (real.sum(1) * seen.sum(1))
