"""Several answers of `dllm-sample`, which come out in the order of their prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from dllm_sampler.cli.inputs import Prompt
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.output import Records, Totals, listed
from dllm_sampler.cli.terminal import show
from dllm_sampler.errors import NotFiniteError, NotWrittenError
from dllm_sampler.generation.batch import SAME
from dllm_sampler.kernels.backend import warn
from dllm_sampler.result import Answer, Result
from dllm_sampler.sampler import Sampler

if TYPE_CHECKING:
    from dllm_sampler.result import Speculation


@dataclass
class Several:
    """Several prompts. Answers come out in the order of the prompts; those that are early wait."""

    given: list[Prompt]
    rows: list[Any]
    forms: list[int] | None
    totals: Totals
    records: Records | None
    samples: int = 1
    first: int = 0  # number of the first prompt in the run, from 0
    differ: bool = False  # two samples of a prompt are not the same
    last: Answer | None = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """How many answers there will be."""
        return len(self.rows) * self.samples

    def run(self, sampler: Sampler, options: Options) -> Iterator[None]:
        """Yields after each answer. Whatever ends it, answers that are done come out.

        Raises:
            NotFiniteError: the model returned NaN for a prompt; the others have been answered.
        """
        answers = sampler.generate_many(
            self.rows,
            batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
            block_length=options.block_length,
            seed=options.seed + self.first * self.samples,
            stop_strings=stop_strings(options),
            forms=self.forms,
            samples=self.samples,
            batching=cast(Literal["in_flight", "static"], options.batching),
        )
        early: dict[int, tuple[Answer, float]] = {}
        following, bad, begun = 0, None, time.perf_counter()
        try:
            for answer in answers:
                early[answer.index * self.samples + answer.sample] = answer, time.perf_counter() - begun
                if answer.finish_reason == "not_finite":
                    bad = bad or NotFiniteError(answer.nfe, [self.first + answer.index + 1])
                while following in early:
                    self._done(*early[following])
                    del early[following]
                    following += 1
                yield
                begun = time.perf_counter()
        except BaseException as error:
            if isinstance(error, NotWrittenError):
                self.records = None  # what is done is shown at least
            for index in sorted(early):
                self._done(*early[index])
            numbers = [at for at in range(following, self.count) if at not in early]
            missing = sorted({self.first + at // self.samples + 1 for at in numbers})
            if missing:
                print(f"stopped: no answer to prompt {listed(missing)}", file=sys.stderr)
            raise
        if bad is not None:
            raise bad
        if self.samples > 1 and not self.differ and not sampler.plugins.context.draws:
            warn(SAME.format(self.samples))

    def _done(self, answer: Answer, seconds: float) -> None:
        result, number = Result.stack([answer]), (self.first + answer.index) * self.samples + answer.sample
        if self.last is not None and self.last.index == answer.index:
            self.differ = self.differ or not torch.equal(self.last.tokens, answer.tokens)
        self.last = answer
        if self.records and number in self.records.there:  # of a prompt with other samples that are missing
            return
        self.totals.add(number, result, seconds)
        if self.records:
            self.records.write(number, [self.given[answer.index]], result, seconds)
        silent = self.records is not None and self.records.replaces_answers
        if answer.finish_reason != "not_finite" and not silent:  # that is no answer
            show_answers(result)


def stop_strings(options: Options) -> Sequence[str]:
    """The texts at which an answer ends."""
    return [options.stop_strings] if isinstance(options.stop_strings, str) else options.stop_strings or ()


def show_answers(result: Result | Speculation) -> None:
    """Print answers."""
    texts = result.texts
    if texts is None:  # no tokenizer: the ids themselves
        pairs = zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
        texts = [" ".join(map(str, tokens[:length])) for tokens, length in pairs]
    for text in texts:
        show(text)
