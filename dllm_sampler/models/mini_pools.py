"""The batches of examples that `mini` was trained on. They are a function of the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dllm_sampler.core.checks import check_count, check_number, check_share
from dllm_sampler.errors import UserError, as_typed, invalid, unknown
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.models.mini_tokenizer import EOS


@dataclass(frozen=True)
class Batch:
    """Rows of one length, so that nothing is padded and no attention mask is needed.

    Args:
        ids: `[B, L] int64` clean tokens.
        prompts: `[B] int64` length of each row's prompt. The rest is the response, its tail of end-of-text tokens
            included.
    """

    ids: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class Pools:
    """Pools of examples that are drawn together, sorted by length, cut into batches, and shuffled.

    Args:
        seed: seed of all draws.
        phases: the number of a phase's first pool to the share of each task or lesson until the next phase, in order.
        size: examples in a pool.
        batch_tokens: most tokens in a batch.
        tails: probabilities of 0, 1, 2, ... more blocks of 8 after the answer's own last block.
        long: share of rows whose response has any length up to `max_response` instead.
        max_response: longest response in tokens. The model is not trained to generate longer ones.

    Raises:
        UserError: a number is out of range, or a task is unknown.
    """

    seed: int
    phases: dict[str, dict[str, float]]
    size: int
    batch_tokens: int
    tails: tuple[float, ...]
    long: float
    max_response: int

    def __post_init__(self) -> None:
        for name in ("size", "batch_tokens", "max_response"):
            check_count(f"train.data.{name}", getattr(self, name))
        check_share("train.data.long", self.long)
        if not all(0 <= share < inf for share in self.tails) or not sum(self.tails) > 0:
            raise invalid("train.data.tails", self.tails, "Give numbers of at least 0, not all of them 0")
        firsts = [int(first) if first.isdecimal() else -1 for first in self.phases]
        if firsts[:1] != [0] or any(later <= first for first, later in pairwise(firsts)):
            said = f"train.data.phases has the keys {as_typed(list(self.phases))}"
            raise UserError("option-range", f"{said}. Use ascending numbers of pools, the first one 0.")
        for first, shares in self.phases.items():
            for name, share in shares.items():
                if name not in LESSONS:
                    raise unknown(f"task of train.data.phases.{first}", name, LESSONS)
                check_number(f"train.data.phases.{first}.{name}", share, finite=True)
            if not sum(shares.values()) > 0:
                raise invalid(f"train.data.phases.{first}", shares, "Give at least one share above 0")

    def batches(self, tokenizer: PreTrainedTokenizerFast, pool: int) -> list[Batch]:
        """Return the batches of one pool, always the same for the same index."""
        rng = Random(f"{self.seed}/{pool}")
        shares = [shares for first, shares in self.phases.items() if int(first) <= pool][-1]
        names = rng.choices(list(shares), list(shares.values()), k=self.size)
        examples = [draw_example(LESSONS[name], rng, held=False) for name in names]
        prompts = tokenizer([prompt for prompt, _ in examples]).input_ids
        answers = tokenizer([answer for _, answer in examples], add_special_tokens=False).input_ids
        lengths = [self._response_length(len(answer), rng) for answer in answers]
        rows = sorted(zip(prompts, answers, lengths, strict=True), key=lambda row: len(row[0]) + row[2])
        eos = tokenizer.get_vocab()[EOS]
        batches = [collate(rows[first:last], eos) for first, last in self._cuts(rows)]
        rng.shuffle(batches)
        return batches

    def _response_length(self, answer: int, rng: Random) -> int:
        if rng.random() < self.long:  # uniform in the logarithm
            return max(answer, round(answer * (self.max_response / answer) ** rng.random()))
        (blocks,) = rng.choices(range(len(self.tails)), self.tails)
        return max(answer, min(8 * (-(-answer // 8) + blocks), self.max_response))

    def _cuts(self, rows: Sequence[tuple[list[int], list[int], int]]) -> Iterator[tuple[int, int]]:
        first = 0
        for index, (prompt, _, response) in enumerate(rows):
            if index > first and (index + 1 - first) * (len(prompt) + response) > self.batch_tokens:
                yield first, index
                first = index
        yield first, len(rows)


def collate(rows: Sequence[tuple[list[int], list[int], int]], eos: int) -> Batch:
    """Return rows (prompt, answer, response length) as a batch. Shorter rows get a longer tail of `eos`."""
    total = max(len(prompt) + response for prompt, _, response in rows)
    ids = [prompt + answer + [eos] * (total - len(prompt) - len(answer)) for prompt, answer, _ in rows]
    return Batch(torch.tensor(ids), torch.tensor([len(prompt) for prompt, _, _ in rows]))
