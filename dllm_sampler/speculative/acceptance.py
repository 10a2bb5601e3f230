"""Which proposals of a drafter stand, by the law of the model that verifies them (arXiv 2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.packing import Answers
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Query


@dataclass(frozen=True)
class Draft:
    """What the drafter proposes: tokens `[B, k]`, and the logits `[B, k, V]` that they were drawn from."""

    ids: Tensor
    logits: Tensor | None  # None: greedy, or drafted in several forwards, whose joint distribution is unknown


def verify(
    canvas: Canvas, at: Tensor, draft: Draft, target: Tensor, width: Tensor, *, draws: bool
) -> tuple[Tensor, Tensor]:
    """Judge proposals: how many are taken `[B]`, and the tokens that follow from that `[B, k+1]`.

    Args:
        canvas: keys the draws.
        at: `[B, k+1]` columns of the proposals and of the token behind them.
        target: `[B, k+1, V]` logits of the target after each proposal, as the guides rewrite them.
        width: `[B]` proposals that count.
        draws: whether tokens are drawn; else a proposal counts where it is the target's best token.
    """
    k = draft.ids.shape[1]
    within = torch.arange(k, device=at.device) < width[:, None]

    def leading(accept: Tensor) -> Tensor:
        return (accept & within).long().cumprod(1).sum(1)

    if not draws:
        best = argmax(target)
        taken = leading(draft.ids == best[:, :k])
        own = best.gather(1, taken[:, None])
    else:
        p = target.softmax(-1, dtype=torch.promote_types(target.dtype, torch.float32))
        q = torch.zeros_like(p)  # the token behind the draft has no proposal: its residual is p itself
        if draft.logits is not None:
            q[:, :k] = draft.logits.softmax(-1, dtype=p.dtype)
        chosen = draft.ids[..., None]
        uniform = canvas.uniform(at[:, :k])
        taken = leading(uniform * q[:, :k].gather(2, chosen)[..., 0] < p[:, :k].gather(2, chosen)[..., 0])
        there = taken[:, None, None].expand(-1, 1, target.shape[-1])
        p, q = p.gather(1, there), q.gather(1, there) * (taken < width)[:, None, None]
        rest = (p - q).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # equal laws, told apart by rounding
        answers = Answers.every(Query.at(canvas, at.gather(1, taken[:, None])))
        noise = answers.spread(canvas.layout.noise.tokens(canvas, answers, target.shape[-1]))[:, 0]
        own = argmax(rest.log() + noise.to(rest.dtype))
    return taken, pad(draft.ids, (0, 1)).scatter(1, taken[:, None], own)
