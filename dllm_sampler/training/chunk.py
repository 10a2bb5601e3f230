"""One forward of training: rows of tokens, what each column sees, and which tokens are asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Chunk:
    """Some items as one forward."""

    row: Tensor  # [n] where each item is from
    columns: Tensor  # [n, Q] columns of the tokens asked about; any where not `there`
    there: Tensor  # [n, Q] bool
    tokens: Tensor  # [n, Q] the right tokens
    ids: Tensor  # [n, M] what the model sees, M = L or, with a clean copy in front, 2L
    positions: Tensor  # [n, M]
    keys: Tensor  # bool [n, M] or [n, M, M]
    answers: Tensor  # [n, Q] index among the M of the row that predicts each token
    mask_id: int

    def to(self, device: torch.device) -> Chunk:
        """The same elsewhere."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def logits(self, model: nn.Module) -> Tensor:
        """`[n, Q, V]` of the tokens asked about, in float32 at least.

        model: a `Transformer`, a `MaskedLM` or a wrapper of one (DDP), called as usual: gradients flow as usual.
        """
        logits = model(self.ids, positions=self.positions, keys=self.keys, rows=self.answers)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def losses(self, model: nn.Module) -> Tensor:
        """Cross-entropies `[n, Q]` of the tokens, 0 where none is asked; the mask token is a word like any other."""
        logits = self.logits(model)
        found = F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten(), reduction="none").view_as(self.tokens)
        return torch.where(self.there, found, 0)

    def score(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[n, Q]` of the tokens and entropies `[n, Q]` of their predictions, 0 where none is asked.

        Untempered. The mask token is no answer, as for the sampler.
        """
        logits = self.logits(model)
        mask = torch.arange(logits.shape[-1], device=logits.device) == self.mask_id
        sure = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
        found = sure.gather(-1, self.tokens[..., None])[..., 0]
        entropy = -(sure.exp() * sure.masked_fill(mask, 0)).sum(-1)
        # Filler must not be multiplied by 0: it may be -inf.
        return torch.where(self.there, found, 0), torch.where(self.there, entropy, 0)
