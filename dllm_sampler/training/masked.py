"""The loss of masked diffusion: the tokens that are hidden, what each counts, and the forward that predicts them.

A bidirectional model sees the prompt and a masked answer, with one mask ratio t for the whole answer (LLaDA, arXiv
2502.09992). A model that works block by block has a ratio for each block. It predicts a block from the clean blocks
before it (block diffusion, arXiv 2503.09573; SDAR, arXiv 2510.06303).

Letters: B rows, L columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError
from dllm_sampler.training.chunk import Chunk

FLOOR = 1e-3  # least probability of a mask
Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a prompt, and of its answer


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
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    ids = [[*prompt, *answer, *[pad] * (max(lengths) - len(prompt) - len(answer))] for prompt, answer in pairs]
    return Rows(torch.tensor(ids), torch.tensor([len(prompt) for prompt, _ in pairs]), torch.tensor(lengths))


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


@dataclass(frozen=True)
class Masks:
    """The hidden tokens of some rows, and their weights in the loss."""

    hidden: Tensor  # [B, L] bool
    weight: Tensor  # [B, L] float64, 0 where nothing is hidden


def weighted(network: nn.Module, one: Chunk, weight: Tensor, spec: ModelSpec) -> Tensor:
    """Return the sum of the cross-entropies of a forward, each times its column's `weight [B, L]`."""
    weight = torch.where(one.there, weight.gather(1, one.columns), 0).to(spec.device)
    losses = one.to(spec.device).losses(network)
    return (losses * weight.to(losses.dtype)).sum()


def blocks(rows: Rows, spec: ModelSpec) -> Tensor | None:
    """Return `[B, L]` the block of each column, from the row's first token on. Returns None for a bidirectional model.

    In a causal context blocks begin with the answer, and the prompt has -1.
    """
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

    A token's weight is divided by the length of its answer, the number of rows, and the number of draws.

    block: `[B, L]` of each column; each block has a ratio t. None gives each row one
    complementary: draw a second time, and hide the rest of the answer; p then ends at 1 - floor
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
    noisy, number = rows.ids.masked_fill(hidden, spec.mask_id), torch.arange(len(rows.ids))
    column = torch.arange(rows.ids.shape[1]).expand_as(noisy)
    return Chunk.of(spec, number, rows.ids, noisy, asked, column, rows.there, blocks(rows, spec))


def padded(pairs: Sequence[Pair], spec: ModelSpec, padding: str | int, most: int) -> Rows:
    """Return a batch of pairs, with end tokens after their answers, which are learned like them.

    padding: `longest` makes all rows as long as the longest of them (LLaDA). `block` fills a row's last block. `none`
        adds nothing. A number is the length of each answer
    most: columns of a row
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
    complementary: bool  # and `inverse`: see `draw`
    inverse: bool

    def __call__(self, network: nn.Module, rows: Rows, dice: Dice) -> Tensor:
        """Return the mean over the rows of their weighted cross-entropies, in one forward."""
        block = blocks(rows, self.spec)
        draws = draw(rows, block, dice, complementary=self.complementary, inverse=self.inverse)
        rows = rows.some(torch.arange(len(rows.ids)).repeat(len(draws)))
        hidden, weight = (torch.cat(each) for each in zip(*((one.hidden, one.weight) for one in draws), strict=True))
        return weighted(network, chunk(rows, hidden, hidden, self.spec), weight, self.spec)
