"""The loss of masked diffusion: which tokens are hidden, what each counts, and the forward that predicts them.

A bidirectional model sees the prompt and a masked answer, with one mask ratio t for the whole answer (LLaDA, arXiv
2502.09992). One that works block by block has a ratio for each block, which it predicts from the clean blocks before
(block diffusion, arXiv 2503.09573; SDAR, arXiv 2510.06303). Blocks of a block-causal model are counted from the row's
first token, those in a causal context from the answer's, as the sampler counts them.

Letters: B rows, L columns, Q tokens asked about in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dllm_sampler.core import select
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import clean_and_noisy
from dllm_sampler.errors import UserError
from dllm_sampler.training.chunk import Chunk

FLOOR = 1e-3  # least probability of a mask
Pair = tuple[list[int], list[int]]  # tokens of a prompt, and of its answer


@dataclass(frozen=True)
class Rows:
    """Prompts and answers, padded on the right."""

    ids: Tensor  # [B, L] int64
    prompt: Tensor  # [B] length of the prompt
    length: Tensor  # [B] of both together

    @property
    def there(self) -> Tensor:
        """`[B, L] bool`: no padding."""
        return torch.arange(self.ids.shape[1]) < self.length[:, None]

    @property
    def answer(self) -> Tensor:
        """`[B, L] bool`: what is learnt."""
        return self.there & (torch.arange(self.ids.shape[1]) >= self.prompt[:, None])

    def some(self, rows: Tensor) -> Rows:
        """Some of the rows, with no more columns than they need."""
        width = int(self.length[rows].max())
        return Rows(self.ids[rows, :width], self.prompt[rows], self.length[rows])


def collate(pairs: list[Pair], pad: int) -> Rows:
    """(prompt, answer) as a batch."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = [[*prompt, *answer, *[pad] * (length - len(prompt) - len(answer))] for prompt, answer in pairs]
    prompts = torch.tensor([len(prompt) for prompt, _ in pairs])
    return Rows(torch.tensor(ids), prompts, torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs]))


@dataclass(frozen=True)
class Masks:
    """What is hidden of some rows, and what each hidden token counts in the loss."""

    hidden: Tensor  # [B, L] bool
    weight: Tensor  # [B, L] float64, 0 where nothing is hidden

    def some(self, rows: Tensor, width: int) -> Masks:
        """Some of the rows, and their first columns."""
        return Masks(self.hidden[rows, :width], self.weight[rows, :width])


@dataclass(frozen=True)
class MaskedLoss:
    """The loss of masked diffusion, or of block diffusion.

    spec: of the model
    complementary, inverse: see `draw`
    """

    spec: ModelSpec
    complementary: bool
    inverse: bool

    @property
    def copies(self) -> int:
        """Columns that each column of a row takes in a forward."""
        return 1 if self.spec.attention == "bidirectional" else 2

    def draw(self, rows: Rows, generator: torch.Generator) -> list[Masks]:
        """What is hidden of a batch, once or twice."""
        options = {"complementary": self.complementary, "inverse": self.inverse}
        return draw(rows, blocks(rows, self.spec), generator, **options)

    def of(self, network: nn.Module, rows: Rows, masks: Masks) -> Tensor:
        """The weighted sum over the hidden tokens of the rows."""
        one = chunk(rows, masks.hidden, masks.hidden, self.spec)
        weight = torch.where(one.there, masks.weight.gather(1, one.columns), 0).to(self.spec.device)
        losses = one.to(self.spec.device).losses(network)
        return (losses * weight.to(losses.dtype)).sum()


def blocks(rows: Rows, spec: ModelSpec) -> Tensor | None:
    """`[B, L]` the block of each column, -1 for a prompt in a causal context; None for a bidirectional model."""
    if spec.attention == "bidirectional":
        return None
    assert spec.block_length is not None
    column = torch.arange(rows.ids.shape[1]).expand_as(rows.ids)
    if spec.attention == "block_causal":
        return column // spec.block_length
    return torch.where(column < rows.prompt[:, None], -1, (column - rows.prompt[:, None]) // spec.block_length)


def draw(
    rows: Rows, block: Tensor | None, generator: torch.Generator, *, complementary: bool, inverse: bool
) -> list[Masks]:
    """Hide tokens of the answers, each by itself with probability p = (1 - FLOOR) t + FLOOR, t uniform on [0, 1].

    Args:
        rows: what is hidden are tokens of answers.
        block: `[B, L]` of each column, each of which has a ratio t; None: each row has one.
        generator: what is drawn is the same however rows are put together to forwards.
        complementary: a second draw that hides the rest of the answer; p then ends at 1 - FLOOR.
        inverse: a token counts 1/p, so that the loss is a bound of the negative log-likelihood; else 1.

    Returns:
        One draw or two. The weights of a token divide by the length of its answer, by the rows, and by the draws.
    """
    count, width = rows.ids.shape
    block = torch.zeros_like(rows.ids) if block is None else block.clamp(min=0)  # [B, L]
    ratio = torch.rand(count, int(block.max()) + 1, generator=generator, dtype=torch.float64).gather(1, block)
    chance = FLOOR + (1 - (1 + complementary) * FLOOR) * ratio
    hidden = torch.rand(count, width, generator=generator, dtype=torch.float64) < chance
    share = 1 / (rows.answer.sum(1, keepdim=True).double() * count * (1 + complementary))  # [B, 1]
    found = [_masks(rows, hidden, share / chance if inverse else share.expand(-1, width))]
    if complementary:
        found.append(_masks(rows, ~hidden, share / (1 - chance) if inverse else share.expand(-1, width)))
    return found


def _masks(rows: Rows, hidden: Tensor, weight: Tensor) -> Masks:
    hidden = hidden & rows.answer
    return Masks(hidden, torch.where(hidden, weight, 0))


def chunk(rows: Rows, hidden: Tensor, asked: Tensor, spec: ModelSpec, numbers: Tensor | None = None) -> Chunk:
    """The forward that predicts tokens of answers.

    Args:
        rows: clean.
        hidden: `[B, L] bool` what the model sees as masks.
        asked: `[B, L] bool` the tokens that it is asked about, some of them.
        spec: the model.
        numbers: `[B]` of the rows, for `Chunk.row`; default 0 to B - 1.
    """
    assert spec.mask_id is not None
    width = rows.ids.shape[1]
    most = max(1, int(asked.sum(1).max()))
    columns = select.columns(torch.cat([asked, torch.zeros_like(asked[:, :1])], 1), most)  # [B, Q]
    there = columns < width
    columns = torch.where(there, columns, rows.prompt[:, None])
    noisy = rows.ids.masked_fill(hidden, spec.mask_id)
    positions, keys = torch.arange(width).expand_as(noisy), rows.there
    answers = columns - int(spec.shift)  # no answer begins in the first column
    block = blocks(rows, spec)
    if block is not None:
        here = block.gather(1, columns)
        if spec.seeds:  # the row before a block predicts its first token
            answers = torch.where(block.gather(1, columns - 1) < here, columns - 1, columns)
        # The row before a block is clean, as it is when the block is decoded.
        answers = answers + torch.where(block.gather(1, answers) == here, width, 0)
        keys = clean_and_noisy(block, keys, keys, causal=spec.attention == "causal_context")
        noisy, positions = torch.cat([rows.ids, noisy], 1), torch.cat([positions] * 2, 1)
    numbers = torch.arange(len(noisy)) if numbers is None else numbers
    return Chunk(numbers, columns, there, rows.ids.gather(1, columns), noisy, positions, keys, answers, spec.mask_id)


def check(spec: ModelSpec, named: str) -> None:
    """Refuse a model for which there is no such loss.

    Raises:
        UserError: it works block by block and says no block length.
    """
    if spec.attention != "bidirectional" and spec.block_length is None:
        raise UserError("model-not-trainable", f"train.model={named} has blocks without a block length")


Length = Callable[[int, int], int]  # tokens of a prompt and of its answer -> of the answer with its end tokens


def padded(
    pairs: list[Pair], eos: int, padding: str | int, block_length: int, most: int, *, own: bool = False
) -> list[Pair]:
    """The pairs with end tokens behind their answers, which are learnt like them.

    Args:
        pairs: answers that end in an end token already.
        eos: that token.
        padding: `longest`: all rows become as long as the longest of them (LLaDA); `block`: a row ends with its block;
            `none`; or the number of tokens of an answer.
        block_length: of `block`, in columns from the row's first; own: from the answer's.
        most: columns of a row.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    lengths: dict[str, Length] = {
        "longest": lambda prompt, answer: longest - prompt,
        "block": lambda prompt, answer: answer + -(answer if own else prompt + answer) % block_length,
        "none": lambda prompt, answer: answer,
    }
    length: Length = lengths[padding] if isinstance(padding, str) else lambda prompt, answer: max(answer, int(padding))
    found = []
    for prompt, answer in pairs:
        tail = min(length(len(prompt), len(answer)), most - len(prompt)) - len(answer)
        found.append((prompt, answer + [eos] * tail))
    return found


def cut(rows: Rows, share: float, generator: torch.Generator) -> Rows:
    """A `share` of the answers, each with its tail, at a random length from 1 on (LLaDA's pre-training: 0.01)."""
    chosen = torch.rand(len(rows.ids), generator=generator) < share
    drawn = torch.rand(len(rows.ids), generator=generator, dtype=torch.float64)
    length = rows.prompt + 1 + (drawn * (rows.length - rows.prompt)).long()
    return replace(rows, length=torch.where(chosen, length.minimum(rows.length), rows.length))
