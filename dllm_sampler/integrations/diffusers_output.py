"""What a step of `DllmScheduler` returns.

Letters: B rows, W positions of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusers.utils.outputs import BaseOutput
from torch import Tensor


@dataclass
class DllmSchedulerOutput(BaseOutput):
    """What a step changes, in the fields that discrete schedulers of diffusers have in common (PR #14741)."""

    prev_sample: Tensor  # [B, W] the block that the next forward is to see
    pred_original_sample: Tensor  # [B, W] the token that the model would write, everywhere
    sampled_probs: Tensor  # [B, W] float32 its probability, before temperature and truncation
    pred_logits: Tensor  # [B, W, V] logits; where noise are random tokens, those that the tokens were chosen from
    committed_mask: Tensor  # [B, W] bool: was noise, and is none any more
    edited_mask: Tensor  # [B, W] bool: was no noise, and has become another token or noise

    @property
    def transfer_index(self) -> Tensor:
        """`committed_mask`, as diffusers 0.42 calls it."""
        return self.committed_mask

    @property
    def editing_transfer_index(self) -> Tensor:
        """`edited_mask`, as diffusers 0.42 calls it."""
        return self.edited_mask

    @property
    def sampled_tokens(self) -> Tensor:
        """`pred_original_sample`, as diffusers 0.42 calls it."""
        return self.pred_original_sample
