"""The masks of the two stages of DEER (arXiv 2512.15176), and their loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.training.masked import Dice, Rows, chunk, weighted


def distill_mask(answer: Tensor, dice: Dice, least: float) -> tuple[Tensor, Tensor]:
    """Return the masked tokens of stage I, each masked with its row's probability t, and weights 1/t, `[B, L]` both.

    Args:
        answer: `[B, L] bool` tokens that may be masked.
        dice: of the rows.
        least: t is uniform from here to 1.
    """
    t = (least + (1 - least) * dice.one())[:, None]  # [B, 1]
    width = answer.shape[1]
    drawn = dice.uniform(_ends(answer), width)
    return answer & (drawn < t), (1 / t).expand(answer.shape)


def refine_mask(answer: Tensor, dice: Dice, longest: int, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the masked tokens of stage II, the last R of an answer, and weights alpha^(R-i), i = 1..R, `[B, L]` both.

    Args:
        answer: `[B, L] bool` tokens that may be masked.
        dice: of the rows.
        longest: R is uniform on 1..longest, but no more than there are.
        alpha: base of the weights. The token next to the prefix of a draft weighs most.
    """
    drawn = 1 + (dice.one() * longest).long()[:, None]
    after = answer.flip(1).cumsum(1).flip(1) - 1  # R - i of the last R tokens
    return answer & (after < drawn), alpha ** after.clamp(min=0).double()


def _ends(answer: Tensor) -> Tensor:
    """Return `[B]` the column after the last token of each answer."""
    return (answer * torch.arange(1, answer.shape[1] + 1)).amax(1)


def stage_loss(
    network: nn.Module, rows: Rows, answer: Tensor, masked: Tensor, weight: Tensor, spec: ModelSpec
) -> Tensor:
    """Return the mean over the rows of the weighted nats of their masked tokens, per token of the answer.

    Args:
        network: the drafter, called as a `Transformer`.
        rows: prompts and answers, separators included.
        answer: `[B, L] bool` tokens that may be masked.
        masked: `[B, L] bool` tokens that are.
        weight: `[B, L]` of each token.
        spec: of the drafter. A block-causal one sees the blocks before as they are here, masks included, since a draft
            masks them all at once.
    """
    one = chunk(rows, masked, masked, replace(spec, attention="bidirectional", seeds=False))
    if spec.attention == "block_causal":
        assert spec.block_length is not None
        seen = block_causal(one.positions, one.positions, spec.block_length)
        one = replace(one, keys=one.keys[:, None] & seen)
    return weighted(network, one, weight.double() / (answer.sum(1, keepdim=True) * len(answer)), spec)
