"""The operations of the shipped model, on prompts that its training never saw."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar, Literal

from dllm_sampler.errors import unknown
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.models.mini_tasks import TASKS, draw_example
from dllm_sampler.models.mini_tasks import Task as Operation
from dllm_sampler.models.mini_tokenizer import OTHERS

CANVAS = 32  # tokens: no answer needs more
# Several answers are right. The steps of a sum determine one another, but its C(Y|X) is 0: the prompt determines all.
MANY = ("shuffle", "insert randomly", "remove randomly", "replace randomly", "latin")


def held_out_prompts(task: Operation, count: int, seed: int = 0) -> list[str]:
    """Draw prompts that training never saw, always the same ones for a seed (0: those of the model card)."""
    return [prompt for prompt, _ in islice(held_out_examples(task, seed), count)]


def held_out_examples(task: Operation, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the prompts of `held_out_prompts` without end, each with a right answer."""
    rng = Random(f"card/{task.name}" + f"/{seed}" * bool(seed))
    while True:
        yield draw_example(task.draw, rng, held=True)


@dataclass
class Mini(Task):
    """An operation of the shipped model on prompts that its training never saw. Every right answer counts.

    Args:
        operation: a name of `dllm_sampler.models.mini_tasks.TASKS`.
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
        """`high` if several answers to a prompt are right, else `low`."""
        return "high" if self.operation in MANY else "low"

    def samples(self) -> Sequence[Sample]:
        """Return samples with the prompts of `held_out_prompts`."""
        prompts = held_out_prompts(TASKS[self.operation], self.count, self.seed)
        return [Sample(index, prompt) for index, prompt in enumerate(prompts)]

    def reference(self, sample: Sample) -> str:
        """Return a right answer, drawn in the same way as the answers in training."""
        found = held_out_examples(TASKS[self.operation], self.seed)
        return next(answer for prompt, answer in found if prompt == sample.prompt)

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `exact_match`, and the kinds of mistakes in a list, each 0 or 1."""
        prompt = sample.prompt
        assert isinstance(prompt, str)
        right = TASKS[self.operation].check(prompt, answer.text)
        found = {"exact_match": float(right), "error_truncated": float(not right and len(answer.ids) >= CANVAS)}
        if self.operation in OTHERS:
            return found
        items, _, extra = prompt.partition(": ")[2].partition("; ")
        known, counts = Counter([*items.split(", "), *([extra] * bool(extra))]), Counter(answer.text.split(", "))
        lost = (known - counts).total() - self.operation.startswith(("remove", "replace"))
        return found | {
            "error_duplicate": float(any(count > known[name] > 0 for name, count in counts.items())),
            "error_missing": float(not right and lost > 0),
            "error_unknown": float(any(name not in known for name in counts)),
        }
