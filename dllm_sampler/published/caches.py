"""dKV-Cache and Elastic-Cache as in their published code."""

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
    """dKV-Cache with the published rule for the last row of a canvas on models with a logit shift.

    Source: dKV-Cache's Dream path, arXiv 2505.15781. The last row predicts nothing. With `un` its keys are cached from
    the second forward on, and with `un_right` when those of the row before it are.
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
    """Elastic-Cache that compares attention maps by their cosine over heads, averaged over the keys.

    Source: the code of Elastic-Cache, arXiv 2510.14973.
    """

    @override
    def similarity(self, before: Tensor, now: Tensor, plan: ElasticPlan) -> Tensor:
        real = (plan.tracked < plan.chosen.shape[1] - 1).double()  # [B, T]
        before, now = (a.to(torch.promote_types(a.dtype, torch.float32)) for a in (before, now))
        alike = F.cosine_similarity(before, now, dim=1).double() * real[..., None]  # [B, T, S], 0 at unseen keys
        seen = plan.known.new_ones(alike.shape[::2]) if plan.keys is None else plan.keys
        return alike.sum((1, 2)) / (real.sum(1) * seen.sum(1))
