"""The forward that predicts hidden tokens, and the loss of masked diffusion: B rows of L columns.

A bidirectional model has one mask ratio t for an answer (LLaDA, arXiv 2502.09992). Others have one for each block. They
predict a block from the clean blocks before it (block diffusion, arXiv 2503.09573; SDAR, arXiv 2510.06303).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.rnn import pad_sequence

from dllm_sampler.core import select
from dllm_sampler.core.checks import is_real
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import clean_and_noisy
from dllm_sampler.errors import RandomScoreWarning, UserError
from dllm_sampler.models.scorable import scorable

FLOOR = 1e-3  # least probability of a mask
Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a prompt, and of its answer
Copy = tuple[Tensor, Tensor, Tensor] | None  # [n, L] each: blocks of columns, and tokens and `there` of a clean copy


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
        spec: ModelSpec, ids: Tensor, noisy: Tensor, asked: Tensor, positions: Tensor, keys: Tensor, copy: Copy = None
    ) -> Chunk:
        """Return the forward that predicts the tokens `asked [n, L] bool` of `ids [n, L]` from `noisy [n, L]`."""
        assert spec.mask_id is not None
        width = ids.shape[1]
        columns = select.columns(F.pad(asked, (0, 1)), max(1, int(asked.sum(1).max())))  # [n, Q]
        there = columns < width
        columns = torch.where(there, columns, columns[:, :1].clamp(max=width - 1))
        before = torch.where(positions.gather(1, columns) > 0, columns - 1, columns)
        answers = before if spec.shift else columns
        if copy is not None:
            block, clean, real = copy
            here = block.gather(1, columns)
            if spec.seeds:  # the column before a block predicts its first token
                answers = torch.where(block.gather(1, before) < here, before, columns)
            # The column before a block is clean, as it is when the block is decoded.
            answers = answers + torch.where(block.gather(1, answers) == here, width, 0)
            keys = clean_and_noisy(block, real, keys, causal=spec.attention == "causal_context")
            noisy, positions = torch.cat([clean, noisy], 1), torch.cat([positions] * 2, 1)
        row, tokens = torch.arange(len(ids)), ids.gather(1, columns)
        return Chunk(row, columns, there, tokens, noisy, positions, keys, answers, spec.mask_id)

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

        They are untempered and without the mask token, as the sampler records them.
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
            said = f"The scored model is in train mode with dropout ({name}), so its log-probabilities are random."
            said += " Call model.eval() first, or set dropout to 0."
            return warnings.warn(said, RandomScoreWarning, stacklevel=3)


@dataclass(frozen=True)
class Rows:
    """Prompts and answers, padded on the right."""

    ids: Tensor  # [B, L] int64
    prompt: Tensor  # [B] length of the prompt
    length: Tensor  # [B] length of both together

    @property
    def there(self) -> Tensor:
        """`[B, L] bool` columns that are not padding."""
        return torch.arange(self.ids.shape[1]) < self.length[:, None]

    @property
    def answer(self) -> Tensor:
        """`[B, L] bool` columns that are learned."""
        return self.there & (torch.arange(self.ids.shape[1]) >= self.prompt[:, None])

    @property
    def share(self) -> Tensor:
        """`[B, 1] float64` weight of each token in the mean over an answer's tokens, then over the rows."""
        return 1 / (self.answer.sum(1, keepdim=True).double() * len(self.ids))

    def some(self, rows: Tensor) -> Rows:
        """Return some of the rows, with no more columns than they need."""
        width = int(self.length[rows].max())
        return Rows(self.ids[rows, :width], self.prompt[rows], self.length[rows])


def collate(pairs: Sequence[Pair], pad: int) -> Rows:
    """Return (prompt, answer) pairs as a batch, padded with the token `pad`."""
    ids = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    prompts, lengths = torch.tensor([len(prompt) for prompt, _ in pairs]), torch.tensor([*map(len, ids)])
    return Rows(pad_sequence(ids, batch_first=True, padding_value=pad), prompts, lengths)


class Dice:
    """A random generator per row. What a row draws does not depend on its batch."""

    def __init__(self, seeds: Sequence[object]):
        self._rows = [torch.Generator().manual_seed(Random(str(seed)).getrandbits(62)) for seed in seeds]

    def uniform(self, counts: Tensor, width: int) -> Tensor:
        """Return `[B, width]` float64: each row draws its first `counts [B]` numbers from 0 to 1. The rest are 1."""
        found = torch.ones(len(self._rows), width, dtype=torch.float64)
        for row, (generator, count) in enumerate(zip(self._rows, counts.tolist(), strict=True)):
            found[row, :count] = torch.rand(count, generator=generator, dtype=torch.float64)
        return found

    def one(self) -> Tensor:
        """Return one number from 0 to 1 for each row, `[B]` float64."""
        return self.uniform(torch.ones(len(self._rows), dtype=torch.long), 1)[:, 0]


class Masks(NamedTuple):
    """The hidden tokens of some rows, and their weights in the loss."""

    hidden: Tensor  # [B, L] bool
    weight: Tensor  # [B, L] float64, 0 if not hidden; means over an answer, the rows and the draws are in it


def weighted(network: nn.Module, one: Chunk, weight: Tensor, spec: ModelSpec) -> Tensor:
    """Return the sum of the cross-entropies of a forward, each times its column's `weight [B, L]`."""
    weight = torch.where(one.there, weight.gather(1, one.columns), 0).to(spec.device)
    losses = one.to(spec.device).losses(network)
    return (losses * weight.to(losses.dtype)).sum()


def blocks(rows: Rows, spec: ModelSpec) -> Tensor | None:
    """Return `[B, L]` the block of each column, -1 for the prompt of a causal context. None: a bidirectional model."""
    if spec.attention == "bidirectional":
        return None
    if spec.block_length is None:
        raise UserError("model-not-trainable", "the model has blocks without a length. Set model.block_length.")
    column = torch.arange(rows.ids.shape[1]).expand_as(rows.ids)
    if spec.attention == "block_causal":
        return column // spec.block_length
    return torch.where(column < rows.prompt[:, None], -1, (column - rows.prompt[:, None]) // spec.block_length)


def draw(
    rows: Rows, block: Tensor | None, dice: Dice, *, complementary: bool, inverse: bool, floor: float = FLOOR
) -> list[Masks]:
    """Hide tokens of the answers, each by itself with probability p = (1 - floor) t + floor, t uniform on [0, 1].

    block: `[B, L]` of each column; each block has a ratio t. None gives each row one
    complementary: hide the rest of the answer in a second draw; p then ends at 1 - floor
    inverse: a token counts 1/p, so that the loss is a bound of the negative log-likelihood; else 1
    """
    width = rows.ids.shape[1]
    block = torch.zeros_like(rows.ids) if block is None else block.clamp(min=0)  # [B, L]
    last = block.gather(1, rows.length[:, None] - 1)[:, 0]  # [B] blocks beyond it are padding
    ratio = dice.uniform(last + 1, int(last.max()) + 1).gather(1, block.minimum(last[:, None]))
    chance = floor + (1 - (1 + complementary) * floor) * ratio
    hidden = dice.uniform(rows.length, width) < chance
    share = rows.share / (1 + complementary)
    parts = [(hidden, chance), (~hidden, 1 - chance)] if complementary else [(hidden, chance)]
    return [
        Masks(at & rows.answer, torch.where(at & rows.answer, share / p if inverse else share, 0)) for at, p in parts
    ]


def chunk(rows: Rows, hidden: Tensor, asked: Tensor, spec: ModelSpec) -> Chunk:
    """Return the forward that predicts the tokens `asked [B, L] bool`, where the `hidden [B, L]` are seen as masks."""
    assert spec.mask_id is not None
    noisy, block = rows.ids.masked_fill(hidden, spec.mask_id), blocks(rows, spec)
    column = torch.arange(rows.ids.shape[1]).expand_as(noisy)
    copy = None if block is None else (block, rows.ids, rows.there)
    return Chunk.of(spec, rows.ids, noisy, asked, column, rows.there, copy)


def padded(pairs: Sequence[Pair], spec: ModelSpec, padding: str | int, most: int) -> Rows:
    """Return a batch of pairs, with end-of-text tokens after their answers, but at most `most` columns a row.

    padding: `longest` fills up to the longest row (LLaDA), `block` the last block; a number is the length of answers
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    own = spec.attention == "causal_context" or spec.encoder  # blocks begin with the answer
    found: list[Pair] = []
    for prompt, answer in pairs:
        length = len(answer)
        if padding == "longest":
            length = longest - len(prompt)
        elif padding == "block":
            length += -(length if own else len(prompt) + length) % (spec.block_length or 1)
        elif padding != "none":
            length = max(length, int(padding))
        found.append((prompt, [*answer, *[spec.eos_id] * (min(length, most - len(prompt)) - len(answer))]))
    return collate(found, spec.eos_id)


@dataclass(frozen=True)
class MaskedLoss:
    """The loss of masked diffusion, or of block diffusion."""

    spec: ModelSpec
    complementary: bool  # see `draw`
    inverse: bool

    def __call__(self, network: nn.Module, rows: Rows, dice: Dice) -> Tensor:
        """Return the mean over the rows of their weighted cross-entropies, in one forward."""
        block = blocks(rows, self.spec)
        draws = draw(rows, block, dice, complementary=self.complementary, inverse=self.inverse)
        rows = rows.some(torch.arange(len(rows.ids)).repeat(len(draws)))
        hidden, weight = map(torch.cat, zip(*draws, strict=True))
        return weighted(network, chunk(rows, hidden, hidden, self.spec), weight, self.spec)
