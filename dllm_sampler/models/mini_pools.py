"""The batches of examples that `mini` was trained on. They are a function of the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dllm_sampler.core.checks import check_count, check_share
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.models.mini_tokenizer import EOS


@dataclass(frozen=True)
class Batch:
    """Rows of one length, so that nothing is padded and no attention mask is needed.

    Args:
        ids: `[B, L] int64` clean tokens.
        prompts: `[B] int64` length of each row's prompt. The rest is the response, its tail of end tokens included.
    """

    ids: Tensor
    prompts: Tensor


@dataclass(frozen=True)
class Pools:
    """Pools of examples that are drawn together, sorted by length, cut into batches, and shuffled.

    Args:
        seed: seed of all draws.
        phases: by the number of their first pool, in order: share of each task or lesson until the next phase begins.
        size: examples in a pool.
        batch_tokens: most tokens in a batch.
        tails: probabilities of 0, 1, 2, ... more blocks of 8 after the answer's own last block.
        long: share of rows whose response has any length up to `max_response` instead.
        max_response: longest response in tokens. The model is not trained to generate longer ones.
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
        _check_shares("train.data.tails", self.tails)
        if not self.phases or any(not first.isdecimal() for first in self.phases) or "0" not in self.phases:
            raise UserError(
                "option-range",
                f"train.data.phases has the keys [{', '.join(self.phases)}]. Use numbers of pools, the first one 0.",
            )
        for first, shares in self.phases.items():
            for name in shares:
                if name not in LESSONS:
                    raise unknown("task", name, LESSONS)
            _check_shares(f"train.data.phases.{first}", list(shares.values()))

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


def _check_shares(name: str, shares: Sequence[float]) -> None:
    if not all(0 <= share < inf for share in shares) or not sum(shares) > 0:
        raise UserError("option-range", f"{name} is {list(shares)}. Give numbers of at least 0, not all of them 0.")


def collate(rows: Sequence[tuple[list[int], list[int], int]], eos: int) -> Batch:
    """Return rows (prompt, answer, response length) as a batch. Shorter rows get a longer tail of end tokens."""
    total = max(len(prompt) + response for prompt, _, response in rows)
    ids = [prompt + answer + [eos] * (total - len(prompt) - len(answer)) for prompt, answer, _ in rows]
    return Batch(torch.tensor(ids), torch.tensor([len(prompt) for prompt, _, _ in rows]))
