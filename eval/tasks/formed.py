"""A task whose prompts fix the form of the answers, to compare decoding with and without a guide."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import ClassVar

from typing_extensions import override

from dllm_sampler.errors import unknown
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.mini import Mini, held_out_examples
from dllm_sampler.guides import Regex
from dllm_sampler.models.mini_tasks import TASKS, latin_squares

OPERATIONS = ("latin", "shuffle", "json")
NAMES = 5  # orders of more would make long expressions


@dataclass
class Formed(Mini):
    """An operation of the shipped model, and the regular expression that every answer to the prompt must match.

    For `latin` it matches all latin squares, for `shuffle` the prompt's names (at most five) in any order, and for
    `json` objects with the prompt's keys. It also matches wrong answers. `guided=true` holds each answer to it.

    Args:
        operation: latin, shuffle or json.
    """

    name: ClassVar[str] = "formed"

    operation: str = "latin"

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise unknown("task.operation", self.operation, OPERATIONS)

    @override
    def samples(self) -> Sequence[Sample]:
        if self.operation != "shuffle":
            return super().samples()
        drawn = held_out_examples(TASKS[self.operation], self.seed)
        fitting = (prompt for prompt, _ in drawn if prompt.count(",") < NAMES)
        return [Sample(index, prompt) for index, prompt in enumerate(islice(fitting, self.count))]

    @override
    def form(self, sample: Sample) -> str:
        items = str(sample.prompt).partition(": ")[2].split(", ")
        if self.operation == "latin":
            return "|".join(latin_squares())
        if self.operation == "json":
            keys = [item.split(" ")[0] for item in items]
            pairs = [f'"{key}": ' + ("[0-9]+" if key == "age" else '"[A-Za-z]+"') for key in keys]
            return r"\{" + ", ".join(pairs) + r"\}"
        return "|".join(sorted({", ".join(order) for order in permutations(items)}))

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return the grades of `Mini`, and `valid`: 1 if the answer has the form."""
        fits = re.fullmatch(self.form(sample), answer.text) is not None
        return {**super().grade(sample, answer), "valid": float(fits)}


@dataclass(frozen=True)
class Demanded(Regex):
    """The guide of `guided=true`, with the regular expressions of a task's answers."""

    stands_for: ClassVar[str] = "regex (of guided=true)"
