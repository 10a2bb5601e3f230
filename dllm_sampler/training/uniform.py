"""The loss of uniform diffusion (DiffusionGemma): some tokens of a canvas are replaced by others, all are predicted.

It has no paper, and follows NVIDIA's public recipe (NeMo AutoModel, `dllm_sft`), which learns one canvas of each answer
in a step. This module learns all of them, each with its own noise level. B rows, L columns, A of the longest answer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.training import masked
from dllm_sampler.training.masked import Dice, Rows


@dataclass(frozen=True)
class UniformLoss:
    """The loss of a model that denoises canvases of random tokens."""

    spec: ModelSpec  # its blocks, counted from the answer's first token, are the canvases
    self_conditioning: float  # share of the examples whose decoder sees its own first prediction
    encoder: float  # weight of the encoder's next-token loss

    def draw(self, rows: Rows, dice: Dice) -> tuple[Tensor, Tensor]:
        """Replace tokens of each canvas with probability t, uniform from 0.001 to 1, by any token.

        Returns the new `[B, L]` ids, and `[B] bool` rows whose decoder sees its own first prediction.
        """
        assert self.spec.block_length is not None
        block = (torch.arange(rows.ids.shape[1]) - rows.prompt[:, None]) // self.spec.block_length  # [B, L]
        (masks,) = masked.draw(rows, block, dice, complementary=False, inverse=False)
        other = (dice.uniform(rows.length, rows.ids.shape[1]) * self.spec.vocab_size).long()
        return torch.where(masks.hidden, other, rows.ids), dice.one() < self.self_conditioning

    def __call__(self, network: nn.Module, rows: Rows, dice: Dice) -> Tensor:
        """Return the mean over the rows of the mean cross-entropy of their answers' tokens."""
        (noisy, again), device = self.draw(rows, dice), self.spec.device
        columns = rows.prompt[:, None] + torch.arange(int((rows.length - rows.prompt).max()))  # [B, A]
        there = columns < rows.length[:, None]
        columns = columns.minimum(rows.length[:, None] - 1)
        tokens, weight = rows.ids.gather(1, columns), torch.where(there, rows.share, 0)
        given = (rows.ids, rows.length, noisy.gather(1, columns), columns, rows.prompt, again)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), tokens.to(device).flatten(), reduction="none").view(tokens.shape)
            for logits in network(*(each.to(device) for each in given), read=self.encoder > 0)
        ]
        total = losses[0] if len(losses) == 1 else losses[0] + self.encoder * losses[1]
        return (total * weight.to(total)).sum()
