"""The contract of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dllm_sampler.core.protocols import Denoiser


@dataclass(frozen=True)
class Sample:
    """One question.

    index: its place in the task; its seed and name follow from it
    prompt: text, chat messages, or (for test beds, which have no tokenizer) token ids
    facts: what grading needs, as JSON allows it
    """

    index: int
    prompt: str | Sequence[Mapping[str, str]] | Sequence[int]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer of a sampler: text without special tokens, and the token ids after the prompt up to the first end.

    canvas: all token ids after the prompt; step_map: the forward that committed each; nfe: forwards
    tokenizer: the model's. None if it has none. Only `Task.grade` gets these four.
    """

    text: str
    ids: Sequence[int]
    canvas: Sequence[int] = ()
    step_map: Sequence[int] = ()
    nfe: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None


@dataclass
class Task:
    """Samples and their grading. A subclass is a dataclass whose fields are its YAML in `conf/task/`.

    `name` and `max_new_tokens` may be properties, where fields decide.

    Args:
        count: how many samples.
        seed: of the samples: the same fields are the same samples on every machine.
    """

    name: ClassVar[str]
    score: ClassVar[str] = "score"  # the measure (0 to 1, higher is better) that reports show first
    max_new_tokens: ClassVar[int] = 32

    count: int = 100
    seed: int = 0

    def samples(self) -> Sequence[Sample]:
        """Return all samples, in order. Sample i does not depend on `count`."""
        raise NotImplementedError

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str | Sequence[Any]:
        """Return what the sampler gets for a sample. A task that fixes every token of a prompt returns token ids."""
        return sample.prompt

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return measures of one answer by name, with `score`."""
        raise NotImplementedError

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return measures that only all answers together have, by name."""
        return {}

    def reference(self, sample: Sample) -> str | Sequence[int] | None:
        """Return a right answer, text or token ids, for `measure=likelihood`. None if the task has none."""
        return None

    def form(self, sample: Sample) -> str | None:
        """Return the regular expression that every answer to a sample matches, right or wrong, if there is one."""
        return None

    @property
    def content(self) -> str | None:
        """A digest of further sources of samples and grading, for example of other files.

        It is part of a run's identity. None if the class's module and the files that fields name are all.
        """
        return None

    def source(self, sample: Sample) -> str | None:
        """Return the file and line of a sample, for errors, or None if it is made from the fields."""
        return None

    @property
    def dependency(self) -> Literal["low", "high"] | None:
        """Dependency between the tokens of an answer (ParallelBench's question), if known."""
        return None

    def denoiser(self) -> Denoiser | None:
        """Return the model of a test bed, whose truth is known, or None for a task for any model."""
        return None
