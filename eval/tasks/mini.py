"""The operations that the shipped model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from dllm_sampler.errors import unknown
from dllm_sampler.eval.exact_match import CANVAS, HARD, held_out_prompts
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.training.tasks import TASKS


@dataclass
class Mini(Task):
    """Prompts that training never saw; every right answer counts.

    Args:
        operation: a name of `dllm_sampler.training.tasks.TASKS`.
    """

    name: ClassVar[str] = "mini"
    score: ClassVar[str] = "exact_match"
    max_new_tokens: ClassVar[int] = CANVAS

    operation: str = "copy"

    def __post_init__(self) -> None:
        if self.operation not in TASKS:
            raise unknown("task.operation", self.operation, TASKS)

    @property
    def dependency(self) -> Literal["low", "high"]:
        """See `Task.dependency`."""
        return "high" if self.operation in HARD else "low"

    def samples(self) -> Sequence[Sample]:
        """See `Task.samples`."""
        prompts = held_out_prompts(TASKS[self.operation], self.count, self.seed)
        return [Sample(index, prompt) for index, prompt in enumerate(prompts)]

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """See `Task.grade`."""
        assert isinstance(sample.prompt, str)
        return {"exact_match": float(TASKS[self.operation].check(sample.prompt, answer.text))}
