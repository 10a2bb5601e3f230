"""The loss of certainty-forcing distillation (dParallel, arXiv 2509.26488).

Of each answer one block is active: what is before it is kept, and what is after it is masked. A random part of the
block is masked in one sample and the rest in a second one. The loss of a sample is the mean cross-entropy of its masked
tokens, plus a multiple of the mean entropy of those that are predicted rightly.

The published code writes the mask of one row over all rows of its batch and so needs batches of one; here rows are
independent. Where the answer ends with a block the published draw of the block may be empty; here it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.training.masked import FLOOR, Dice, Rows


@dataclass(frozen=True)
class Halves:
    """The tokens that two complementary samples mask, `[B, L] bool`."""

    one: Tensor
    other: Tensor  # the rest of the active block
    future: Tensor  # after it: masked in both, in no loss


def split(rows: Rows, size: int, ratio: float, dice: Dice, *, aligned: bool = False) -> Halves:
    """Draw each row's active block, one of its blocks of `size` with equal chances, and split it in two parts.

    Args:
        rows: clean.
        size: of a block.
        ratio: share of the first part, drawn for each token by itself.
        dice: of the rows.
        aligned: blocks are counted from the row's first token, as block-causal models do; else from the answer's.
    """
    origin = rows.prompt - rows.prompt % size if aligned else rows.prompt
    blocks = (rows.length - origin + size - 1).div(size, rounding_mode="floor").clamp(min=1)
    drawn = (dice.one() * blocks).long()  # [B]
    first = (origin + drawn * size)[:, None]
    column = torch.arange(rows.ids.shape[1])
    active = (column >= first) & (column < first + size) & rows.answer
    chance = (1 - FLOOR) * ratio + FLOOR
    one = active & (dice.uniform(rows.length, rows.ids.shape[1]) < chance)
    return Halves(one, active & ~one, rows.there & (column >= first + size))


def certainty_loss(
    logits: Tensor, ids: Tensor, masked: Tensor, temperature: float, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy, entropy of what is right, and share that is right, `[B]` each; 0 where there is none.

    Args:
        logits: `[B, L, V]`, row i predicts token i. The mask token is left out.
        ids: `[B, L]` the tokens.
        masked: `[B, L] bool` tokens that count.
        temperature: of the distribution whose entropy it is.
        mask_id: the mask token.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    logits = logits.masked_fill(mask, -torch.inf)
    losses = -logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]  # [B, L]
    right = masked & (logits.argmax(-1) == ids)
    sure = (logits / temperature).log_softmax(-1)
    entropy = -(sure.exp() * sure.masked_fill(mask, 0)).sum(-1)  # [B, L]

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, 0).sum(1) / where.sum(1).clamp(min=1)

    return mean(losses, masked), mean(entropy, right), mean(right.to(losses), masked)
