"""What the two stages of DEER (arXiv 2512.15176) mask, and their loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.training import masking
from dllm_sampler.training.masking import Rows


def distill_mask(answer: Tensor, generator: torch.Generator, least: float) -> tuple[Tensor, Tensor]:
    """Stage I: what to mask of `answer [B, L] bool`, each token with its row's probability t, and weights 1/t `[B, L]`.

    t is uniform on [least, 1], stratified over the batch.
    """
    batch = len(answer)
    strata = (torch.randperm(batch, generator=generator) + torch.rand(batch, generator=generator)) / batch
    t = (least + (1 - least) * strata)[:, None]  # [B, 1]
    return answer & (torch.rand(answer.shape, generator=generator) < t), (1 / t).expand(answer.shape)


def refine_mask(answer: Tensor, generator: torch.Generator, longest: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Stage II: the last R tokens of `answer [B, L] bool`, R uniform on 1..longest but no more than there are, and
    weights alpha^(R-i) `[B, L]`, i = 1..R from the prefix on."""
    drawn = torch.randint(1, longest + 1, (len(answer), 1), generator=generator)
    behind = answer.flip(1).cumsum(1).flip(1) - 1  # R - i of the last R tokens
    return answer & (behind < drawn), alpha ** behind.clamp(min=0).float()


def masked_loss(
    network: nn.Module, rows: Rows, answer: Tensor, masked: Tensor, weight: Tensor, spec: ModelSpec
) -> Tensor:
    """Weighted nats of the masked tokens, per token of the answers.

    Args:
        network: the drafter, called as a `Transformer`.
        rows: prompts and answers, separators included.
        answer: `[B, L] bool` what may be masked.
        masked: `[B, L] bool` what is.
        weight: `[B, L]` of each token.
        spec: of the drafter. A block-causal one sees the blocks before as they are here, masks included, since a draft
            masks them all at once.
    """
    one = masking.chunk(rows, masked, masked, replace(spec, attention="bidirectional", seeds=False))
    if spec.attention == "block_causal":
        assert spec.block_length is not None
        seen = block_causal(one.positions, one.positions, spec.block_length)
        one = replace(one, keys=one.keys[:, None] & seen)
    losses = one.to(spec.device).losses(network)
    weight = torch.where(one.there, weight.gather(1, one.columns), 0).to(losses)
    return (losses * weight).sum() / answer.sum()
