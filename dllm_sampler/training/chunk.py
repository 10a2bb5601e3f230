"""One forward of training: rows of tokens, what each column sees, and which tokens are predicted."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from dllm_sampler.core import select
from dllm_sampler.core.checks import is_real
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import clean_and_noisy
from dllm_sampler.errors import RandomScoreWarning
from dllm_sampler.models.scorable import scorable


@dataclass(frozen=True)
class Chunk:
    """A forward of n items, each with tokens to predict. Items with equal inputs may share one of the N rows."""

    row: Tensor  # [n] the row of the batch or trace that each item is from
    columns: Tensor  # [n, Q] columns of the predicted tokens; any where not `there`
    there: Tensor  # [n, Q] bool
    tokens: Tensor  # [n, Q] the right tokens
    ids: Tensor  # [N, M] what the model sees, M = L or, with a clean copy before the noisy one, 2L
    positions: Tensor  # [N, M]
    keys: Tensor  # bool [N, M] or [N, M, M]
    answers: Tensor  # [N, R] index among the M of each row that predicts a token
    mask_id: int
    row_of: Tensor | None = None  # [n] row of N of each item. None if each has its own
    answer_of: Tensor | None = None  # [n, Q] index of R of each token, beside `row_of`

    @staticmethod
    def of(
        spec: ModelSpec,
        row: Tensor,
        ids: Tensor,
        noisy: Tensor,
        asked: Tensor,
        positions: Tensor,
        keys: Tensor,
        block: Tensor | None = None,
        clean: tuple[Tensor, Tensor] | None = None,
    ) -> Chunk:
        """Return the forward that predicts the tokens `asked [n, L] bool` of `ids [n, L]` from `noisy [n, L]`.

        block: `[n, L]` block of each column. The model then sees the blocks before a noisy one in a clean copy
        clean: tokens of that copy and its columns that exist, if not `ids` and `keys`
        """
        assert spec.mask_id is not None
        width = ids.shape[1]
        columns = select.columns(F.pad(asked, (0, 1)), max(1, int(asked.sum(1).max())))  # [n, Q]
        there = columns < width
        columns = torch.where(there, columns, columns[:, :1].clamp(max=width - 1))
        before = torch.where(positions.gather(1, columns) > 0, columns - 1, columns)
        answers = before if spec.shift else columns
        if block is not None:
            here = block.gather(1, columns)
            if spec.seeds:  # the column before a block predicts its first token
                answers = torch.where(block.gather(1, before) < here, before, columns)
            # The column before a block is clean, as it is when the block is decoded.
            answers = answers + torch.where(block.gather(1, answers) == here, width, 0)
            seen, real = clean or (ids, keys)
            keys = clean_and_noisy(block, real, keys, causal=spec.attention == "causal_context")
            noisy, positions = torch.cat([seen, noisy], 1), torch.cat([positions] * 2, 1)
        return Chunk(row, columns, there, ids.gather(1, columns), noisy, positions, keys, answers, spec.mask_id)

    def merged(self, keys: Tensor) -> Chunk:
        """Return the same forward with a single row for items whose `keys [n, K]` are equal: these see the same."""
        _, row = keys.unique(dim=0, return_inverse=True)
        count = int(row.max()) + 1
        first = torch.full((count,), len(row)).scatter_reduce(0, row, torch.arange(len(row)), "amin")  # [N] an item
        width = self.ids.shape[1]
        asked = torch.zeros(count, width + 1, dtype=torch.bool)
        asked[row[:, None], self.answers.masked_fill(~self.there, width)] = True
        asked[:, width] = False
        place = (asked.cumsum(1) - 1)[row].gather(1, self.answers).masked_fill(~self.there, 0)
        answers = select.columns(asked, int(asked.sum(1).max())).clamp(max=width - 1)  # [N, R]
        seen = {name: getattr(self, name)[first] for name in ("ids", "positions", "keys")}
        return replace(self, **seen, answers=answers, row_of=row, answer_of=place)

    def to(self, device: torch.device) -> Chunk:
        """Return the forward with its tensors on a device."""
        tensors: Any = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def scatter(self, values: Tensor, target: Tensor) -> None:
        """Write `values [n, Q]` to the places of their tokens in `target`, `[rows, columns]` on the CPU."""
        row = self.row[:, None].expand_as(self.there)[self.there]
        target[row.cpu(), self.columns[self.there].cpu()] = values[self.there].to(target)

    def logits(self, model: nn.Module | Denoiser) -> Tensor:
        """Return `[n, Q, V]` of the predicted tokens, in float32 at least, with gradients."""
        logits = scorable(model)(self.ids, positions=self.positions, keys=self.keys, rows=self.answers)
        if self.row_of is not None:
            logits = logits[self.row_of[:, None], self.answer_of]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def losses(self, model: nn.Module | Denoiser) -> Tensor:
        """Return cross-entropies `[n, Q]`, 0 where not `there`. The mask token is one of the V words."""
        logits = self.logits(model)
        found = F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten(), reduction="none").view_as(self.tokens)
        return torch.where(self.there, found, 0)

    def score(self, model: nn.Module | Denoiser) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the predictions, `[n, Q]` each, 0 where not `there`.

        They are untempered and without the mask token, as the sampler records them. A model in train mode with dropout
        causes a warning, since its scores are random.
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
    for name, module in model.named_modules() if model.training else ():
        shares = [value for key, value in vars(module).items() if "dropout" in key and is_real(value)]
        if module.training and max([module.p] if isinstance(module, _DropoutNd) else shares, default=0) > 0:
            warnings.warn(
                f"The scored model is in train mode with dropout ({name}), so its log-probabilities are random, and not"
                " the recorded ones. Call model.eval() first, or set dropout to 0.",
                RandomScoreWarning,
                stacklevel=3,
            )
            return
