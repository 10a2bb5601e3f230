"""Tasks whose samples are drawn from a seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal

from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.eval.tasks.base import Sample, Task

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass
class Drawn(Task):
    """A task that draws sample i from its name, its seed and i alone."""

    many: ClassVar[bool] = False  # several answers are right: C(Y|X) > 0

    @property
    @override
    def dependency(self) -> Literal["low", "high"]:
        return "high" if self.many else "low"

    def __post_init__(self) -> None:
        check_count("task.count", self.count)

    @override
    def samples(self) -> Sequence[Sample]:
        return [
            Sample(index, *self.draw(Random(f"{self.name}/{self.seed}/{index}"), index)) for index in range(self.count)
        ]

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Return the prompt of a sample, and its facts for grading."""
        raise NotImplementedError


def chat(question: str, *example: str) -> list[dict[str, str]]:
    """Return chat messages: an example's question and answer, if given, and the question."""
    turns = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), example, strict=bool(example))
    ]
    return [*turns, {"role": "user", "content": question}]
