"""What is kept of one sample: counters, from which every measure is derived, and what a replay needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dllm_sampler.errors import UserError
from dllm_sampler.eval.tasks.base import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = 2  # of a line of samples.jsonl; docs/formats.md
TIMES = ("seconds", "batch", "peak_memory")  # what differs from run to run


@dataclass(frozen=True)
class Record:
    """One sample. Positions count from the first token behind the prompt; N is the canvas length."""

    index: int
    seed: int
    prompt: Any  # as the task has it
    text: str | None
    scores: dict[str, float]
    complete: bool  # False where max_steps ended it before its time
    prompt_tokens: int
    canvas: int  # N
    answer: int  # tokens up to and with the first end token
    ended: bool  # whether there is an end token
    text_tokens: int | None  # of `text`, encoded again; None without a tokenizer
    nfe: int  # forwards it took part in
    rows: int  # positions computed, over all forwards
    commits: int  # tokens written, those that did not stay included
    oracle_nfe: int | None  # forwards of a scheduler that knows the answer; None where that is not defined
    tokens: list[int]  # N ids
    pieces: list[str]  # N texts of these
    step_map: list[int]  # N: the forward, from 0, that committed what stands; -1: never committed
    confidence: list[float]  # N: at the commit
    revisions: list[list[Any]]  # [forward, position, piece] that did not stay; piece None: taken back
    seconds: float  # of its whole batch, or in flight since the answer before
    batch: int  # samples in the batch; 1 in flight
    peak_memory: int  # bytes: of the GPU during the batch or flight, else of the process so far
    # Files of earlier versions lack these.
    finish_reason: str | None = None  # see `dllm_sampler.result.FinishReason`
    valid: bool | None = None  # whether it is what the run's guide wants; None: no guide says
    rejections: int = 0  # commits that the guide refused

    @property
    def full_equivalents(self) -> float:
        """Positions computed, in forwards over the whole prompt and canvas."""
        return self.rows / (self.prompt_tokens + self.canvas)

    @property
    def graded(self) -> Answer:
        """What a task grades: the text, and the tokens before the end token."""
        return Answer(self.text or "", self.tokens[: self.answer - self.ended])

    @property
    def after_end(self) -> int:
        """Tokens committed behind the first end token."""
        return sum(step >= 0 for step in self.step_map[self.answer :])

    @property
    def idle(self) -> int:
        """Forwards that wrote no token of it: they stored, looked, or took back.

        Exact whatever was revised: a token stands in the step map or is among the revisions.
        """
        stood = {step for step in self.step_map if step >= 0}
        return self.nfe - len(stood | {step for step, _, piece in self.revisions if piece is not None})

    def line(self) -> dict[str, Any]:
        """As JSON has it: what differs from run to run apart from the rest.

        Raises:
            UserError: a grade is no number that JSON has.
        """
        for name, value in self.scores.items():
            if not math.isfinite(value):
                raise UserError("task-result", f"the task's grade {name} of sample {self.index} is {value}, not finite")
        fields = asdict(self)
        times = {name: fields.pop(name) for name in TIMES}
        fields["confidence"] = [finite(value) for value in self.confidence]
        return {"schema": SCHEMA, **fields, "times": times}

    @staticmethod
    def of(line: Mapping[str, Any]) -> Record:
        """From JSON.

        Raises:
            ValueError, KeyError, TypeError: it is no record of this schema.
        """
        fields = dict(line)
        if fields.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        fields["confidence"] = [math.nan if value is None else value for value in fields["confidence"]]
        return Record(**fields.pop("times"), **fields)


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def encoded_again(text: str | None, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """How many tokens, none of them special, a text has: not always as many as it was decoded from."""
    if text is None or tokenizer is None:
        return None
    return len(tokenizer.encode(text, add_special_tokens=False))
