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
    """One prompt of a task.

    index: its number in the task, from 0. The seed of its answer is the option `seed` plus this number
    prompt: text, chat messages, or (for test beds, which have no tokenizer) token ids
    facts: values that grading needs, as a JSON object
    """

    index: int
    prompt: str | Sequence[Mapping[str, str]] | Sequence[int]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer of a sampler. `Task.together` gets only `text` and `ids`.

    text: the text without special tokens
    ids: the token ids after the prompt, before the first end-of-text token
    canvas: all token ids after the prompt
    step_map: the forward (from 0) that committed each of `canvas`. -1 if none did
    nfe: number of forwards
    tokenizer: the model's tokenizer, or None if it has none
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

    `name`, `score` and `max_new_tokens` may be properties that depend on fields.

    Args:
        count: number of samples.
        seed: seed of the samples. Equal fields give equal samples on every machine.
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
        """Return the prompt that the sampler gets. A task that fixes every token of a prompt returns token ids."""
        return sample.prompt

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return the grades of one answer by name. The name in the attribute `score` must be among them."""
        raise NotImplementedError

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return measures of all answers together by name, for example a perplexity."""
        return {}

    def reference(self, sample: Sample) -> str | Sequence[int] | None:
        """Return a right answer, text or token ids, for `measure=likelihood`. None if the task has none."""
        return None

    def form(self, sample: Sample) -> str | None:
        """Return the regular expression that every answer to a sample has to match, right or wrong, or None."""
        return None

    @property
    def content(self) -> str | None:
        """A hash of sources other than the class's module and the files that fields name. None if there are none.

        It is part of a run's identity, so a changed source starts a new run.
        """
        return None

    def source(self, sample: Sample) -> str | None:
        """Return the file and line of a sample, for errors, or None if no file has it."""
        return None

    @property
    def dependency(self) -> Literal["low", "high"] | None:
        """Dependency between the tokens of an answer, as ParallelBench classifies tasks. None if unknown."""
        return None

    def denoiser(self) -> Denoiser | None:
        """Return the model of a test bed, or None if the task takes any model."""
        return None
