"""The record of one sample: counters for every measure, and the data of a replay."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from dllm_sampler.errors import UserError
from dllm_sampler.eval.tasks.base import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = 2  # of a line of samples.jsonl
TIMES = ("seconds", "batch", "peak_memory")  # fields that differ from run to run


# Types of fields, checked as a line is read.
Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True)]
Size = Annotated[int, Field(strict=True, ge=1)]
Chance = Annotated[Number, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class Record:
    """One sample, a line of `samples.jsonl`. Positions count from the first token after the prompt.

    A line also has `schema` (2). It has `seconds`, `batch` and `peak_memory` in an object `times`. N is the canvas
    length.

    Attributes:
        index: number of the sample. With `samples=N` the prompt's number, from 0, is `index` divided by N, rounded
            down.
        seed: the seed of the sample's draws.
        prompt: the task's prompt: text, messages or token ids.
        text: the answer. Null without a tokenizer.
        scores: every grade by name.
        complete: false if `max_steps` or a guide ended it early.
        prompt_tokens: length of the prompt.
        canvas: N.
        answer: number of tokens up to and including the first end-of-text token.
        ended: true if there is an end-of-text token.
        text_tokens: number of tokens of `text`, encoded again without special tokens. Null without a tokenizer.
        nfe: forwards that the sample took part in.
        rows: positions computed, over all forwards.
        commits: tokens committed, including those that did not stay.
        oracle_nfe: fewest forwards found with knowledge of the answer. Null if none were counted.
        tokens: N ids.
        pieces: N texts, one for each token.
        step_map: N numbers: the forward (from 0) that committed the final token, or -1 if none did.
        confidence: N probabilities, to two digits, each at the step that committed the token. Their product is not the
            answer's likelihood. Null for a value that is not finite.
        revisions: `[forward, position, text]` of each commit that did not stay. A remask adds an item with its own
            forward and text null.
        seconds: wall seconds of the sample's batch. With batching=in_flight, seconds since the previous answer.
        batch: samples in the batch. 1 with batching=in_flight.
        peak_memory: peak memory of the GPU, in bytes, since the batch (or a run in flight) began. On a CPU, that of the
            process so far.
        finish_reason: the reason that decoding ended, with the values of `dllm-sample`.
        valid: true if the answer satisfies the guide. Null if no guide checks it.
        rejections: commits that the guide refused.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # of a line that is read: see `checked`

    index: Count
    seed: StrictInt
    prompt: Any
    text: StrictStr | None
    scores: dict[str, Annotated[Number, Field(allow_inf_nan=False)]]
    complete: StrictBool
    prompt_tokens: Count
    canvas: Size
    answer: Count
    ended: StrictBool
    text_tokens: Count | None
    nfe: Count
    rows: Count
    commits: Count
    oracle_nfe: Count | None
    tokens: list[Count]
    pieces: list[StrictStr]
    step_map: list[Annotated[int, Field(strict=True, ge=-1)]]
    confidence: list[Chance]
    revisions: list[tuple[Count, Count, StrictStr | None]]
    seconds: Annotated[Number, Field(ge=0, allow_inf_nan=False)]
    batch: Size
    peak_memory: Count
    # Files of earlier versions lack these.
    finish_reason: StrictStr | None = None
    valid: StrictBool | None = None
    rejections: Count = 0

    @property
    def full_equivalents(self) -> float:
        """Positions computed, divided by the number of positions of prompt and canvas."""
        return self.rows / (self.prompt_tokens + self.canvas)

    @property
    def graded(self) -> Answer:
        """The answer to grade: the text, and the tokens before the end-of-text token."""
        return Answer(self.text or "", self.tokens[: self.answer - self.ended])

    @property
    def after_end(self) -> int:
        """Number of tokens committed after the first end-of-text token."""
        return sum(step >= 0 for step in self.step_map[self.answer :])

    @property
    def idle(self) -> int:
        """Number of forwards without a commit, for example to fill the cache or to remask.

        Commits that did not stay count as commits.
        """
        stood = {step for step in self.step_map if step >= 0}
        return self.nfe - len(stood | {step for step, _, piece in self.revisions if piece is not None})

    def line(self) -> dict[str, Any]:
        """Return the record as a JSON object. Fields that differ from run to run are in `times`.

        Raises:
            UserError: a grade is not finite.
        """
        for name, value in self.scores.items():
            if not math.isfinite(value):
                raise UserError(
                    "task-result", f"The task's grade {name} of sample {self.index} is {value}. Return a finite number."
                )
        fields = asdict(self)
        times = {name: fields.pop(name) for name in TIMES}
        fields["confidence"] = [finite(value) for value in self.confidence]
        return {"schema": SCHEMA, **fields, "times": times}


def finite(value: float) -> float | None:
    """Return the number, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def encoded_again(text: str | None, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Return the number of tokens of a text that is encoded again, without special tokens, or None without a tokenizer.

    The number may differ from the number of tokens that were decoded.
    """
    if text is None or tokenizer is None:
        return None
    return len(tokenizer.encode(text, add_special_tokens=False))
