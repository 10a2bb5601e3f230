"""One forward of training: rows of tokens, what each column sees, and which tokens are asked about."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from dllm_sampler.core import select
from dllm_sampler.core.checks import is_real
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.errors import RandomScoreWarning
from dllm_sampler.models.scorable import scorable

_DROPPING = WeakSet[nn.Module]()  # modules of models that a warning has named


@dataclass(frozen=True)
class Chunk:
    """Some items as one forward. Items that see the same share a row of it."""

    row: Tensor  # [n] where each item is from
    columns: Tensor  # [n, Q] columns of the tokens asked about; any where not `there`
    there: Tensor  # [n, Q] bool
    tokens: Tensor  # [n, Q] the right tokens
    ids: Tensor  # [N, M] what the model sees, M = L or, with a clean copy in front, 2L
    positions: Tensor  # [N, M]
    keys: Tensor  # bool [N, M] or [N, M, M]
    answers: Tensor  # [N, R] index among the M of each row that predicts a token
    mask_id: int
    shared: tuple[Tensor, Tensor] | None = None  # [n] row of N, [n, Q] index of R

    @staticmethod
    def merged(keys: Tensor, found: Chunk) -> Chunk:
        """`found`, one row for each item, with a single row for items of equal `keys [n, K]`: these see the same."""
        _, row = keys.unique(dim=0, return_inverse=True)
        number = torch.arange(len(row))
        count = int(row.max()) + 1
        first = torch.full((count,), len(row)).scatter_reduce(0, row, number, "amin")  # [N] an item of each row
        width = found.ids.shape[1]
        asked = torch.zeros(count, width + 1, dtype=torch.bool)
        asked[row[:, None], found.answers.masked_fill(~found.there, width)] = True
        asked[:, width] = False
        place = (asked.cumsum(1) - 1)[row].gather(1, found.answers).masked_fill(~found.there, 0)
        answers = select.columns(asked, int(asked.sum(1).max())).clamp(max=width - 1)  # [N, R]
        seen = {name: getattr(found, name)[first] for name in ("ids", "positions", "keys")}
        return replace(found, **seen, answers=answers, shared=(row, place))

    def to(self, device: torch.device) -> Chunk:
        """The same elsewhere."""
        named = vars(self).items()
        moved: dict[str, Any] = {name: value.to(device) for name, value in named if isinstance(value, Tensor)}
        if self.shared is not None:
            moved["shared"] = tuple(each.to(device) for each in self.shared)
        return replace(self, **moved)

    def scatter(self, values: Tensor, target: Tensor) -> None:
        """Write `values [n, Q]` of the tokens asked about to their places in `target`, `[rows, columns]` on the CPU."""
        row = self.row[:, None].expand_as(self.there)[self.there]
        target[row.cpu(), self.columns[self.there].cpu()] = values[self.there].to(target)

    def logits(self, model: nn.Module | Denoiser) -> Tensor:
        """Return `[n, Q, V]` of the tokens asked about, in float32 at least, with gradients."""
        logits = scorable(model)(self.ids, positions=self.positions, keys=self.keys, rows=self.answers)
        if self.shared is not None:
            logits = logits[self.shared[0][:, None], self.shared[1]]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def losses(self, model: nn.Module | Denoiser) -> Tensor:
        """Cross-entropies `[n, Q]` of the tokens, 0 where none is asked; the mask token is a word like any other."""
        logits = self.logits(model)
        found = F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten(), reduction="none").view_as(self.tokens)
        return torch.where(self.there, found, 0)

    def score(self, model: nn.Module | Denoiser) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[n, Q]` of the tokens and entropies `[n, Q]` of their predictions, 0 where none is asked.

        Untempered, and without the mask token, as the sampler records them: the other tokens share its probability. A
        model in train mode with dropout warns once, since its scores are random.
        """
        model = scorable(model)
        if isinstance(model, nn.Module):
            _warn_of_dropout(model)
        logits = self.logits(model)
        mask = torch.arange(logits.shape[-1], device=logits.device) == self.mask_id
        sure = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
        found = sure.gather(-1, self.tokens[..., None])[..., 0]
        entropy = -(sure.exp() * sure.masked_fill(mask, 0)).sum(-1)
        # Filler must not be multiplied by 0: it may be -inf.
        return torch.where(self.there, found, 0), torch.where(self.there, entropy, 0)


def _warn_of_dropout(model: nn.Module) -> None:
    """Warn once for each model whose scores are random."""
    for name, module in model.named_modules():
        if module.training and module not in _DROPPING and _drops(module):
            _DROPPING.update(model.modules())
            warnings.warn(
                f"The scored model is in train mode with dropout ({name}), so its log-probabilities are random, and not"
                " the recorded ones. Call model.eval() first, or set dropout to 0.",
                RandomScoreWarning,
                stacklevel=3,
            )
            return


def _drops(module: nn.Module) -> bool:
    """Return True if a module in train mode drops a share of its values."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any("dropout" in key and is_real(share) and share > 0 for key, share in vars(module).items())
