"""A task whose prompts are answered several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dllm_sampler.eval.tasks.base import Answer, Sample, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Repeated:
    """A task with several samples for each prompt. All other attributes are those of the inner task.

    Args:
        task: the inner task.
        times: samples for each prompt. Sample i answers prompt `i // times`.
    """

    def __init__(self, task: Task, times: int):
        self.task, self.times = task, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    @cached_property
    def _once(self) -> Sequence[Sample]:
        return self.task.samples()

    def samples(self) -> Sequence[Sample]:
        """Return all samples, those of a prompt next to each other."""
        each = [one for one in self._once for _ in range(self.times)]
        return [replace(one, index=index) for index, one in enumerate(each)]

    def _of(self, sample: Sample) -> Sample:
        """Return the sample of the inner task that a sample repeats."""
        return self._once[sample.index // self.times]

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str | Sequence[Any]:
        """Return the prompt of the repeated sample."""
        return self.task.prompt(self._of(sample), tokenizer)

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return the grades of an answer to the repeated sample."""
        return self.task.grade(self._of(sample), answer)

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return the measures of all answers together from the inner task."""
        return self.task.together([self._of(sample) for sample in samples], answers)

    def reference(self, sample: Sample) -> str | Sequence[int] | None:
        """Return a right answer to the repeated sample, or None."""
        return self.task.reference(self._of(sample))

    def form(self, sample: Sample) -> str | None:
        """Return the regular expression of answers to the repeated sample, or None."""
        return self.task.form(self._of(sample))

    def source(self, sample: Sample) -> str | None:
        """Return the file and line of the repeated sample, or None."""
        return self.task.source(self._of(sample))
