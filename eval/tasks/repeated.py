"""A task whose prompts are answered several times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from dllm_sampler.eval.tasks.base import Answer, Sample, Task

OF_SAMPLE = ("prompt", "grade", "reference", "form", "source")  # methods of a task that take a sample


class Repeated:
    """A task whose sample i has the prompt of sample `i // times` of another. Its other attributes are that one's."""

    def __init__(self, task: Task, times: int):
        self.task, self.times = task, times

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.task, name)
        return (lambda sample, *others: found(self._of(sample), *others)) if name in OF_SAMPLE else found

    @cached_property
    def _once(self) -> Sequence[Sample]:
        return self.task.samples()

    def samples(self) -> Sequence[Sample]:
        """Return all samples. Those with the same prompt are next to each other."""
        each = [one for one in self._once for _ in range(self.times)]
        return [replace(one, index=index) for index, one in enumerate(each)]

    def _of(self, sample: Sample) -> Sample:
        return self._once[sample.index // self.times]

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return the inner task's measures of all answers together."""
        return self.task.together([self._of(sample) for sample in samples], answers)
