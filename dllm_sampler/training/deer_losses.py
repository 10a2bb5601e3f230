"""What the two stages of DEER (arXiv 2512.15176) mask, and their loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.models.transformer import Transformer


@dataclass(frozen=True)
class Rows:
    """Texts of several lengths, padded on the right."""

    ids: Tensor  # [B, L] int64
    there: Tensor  # [B, L] bool: no padding
    answer: Tensor  # [B, L] bool: what may be masked: neither prompt, separator nor padding


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


def masked_loss(network: Transformer, rows: Rows, masked: Tensor, weight: Tensor, mask_id: int) -> Tensor:
    """Weighted nats of the masked tokens, per token of the answers; `masked`, `weight`: `[B, L]`."""
    logits = network(rows.ids.masked_fill(masked, mask_id), keys=rows.there)[masked]
    losses = F.cross_entropy(logits, rows.ids[masked], reduction="none")
    return (losses * weight[masked]).sum() / rows.answer.sum()
