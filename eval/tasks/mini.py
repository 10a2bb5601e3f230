"""The operations of the shipped model, on prompts that training never saw: ParallelBench's finding on a laptop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from math import log2
from random import Random
from typing import Any, ClassVar, Literal

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
    """Draw the same prompts without end, each with a right answer."""
    rng = Random(f"card/{task.name}" + f"/{seed}" * bool(seed))
    while True:
        yield draw_example(task.draw, rng, held=True)


@dataclass
class Mini(Task):
    """Prompts that training never saw; every right answer counts.

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
        """See `Task.dependency`: whether several answers are right."""
        return "high" if self.operation in MANY else "low"

    def samples(self) -> Sequence[Sample]:
        """The card's prompts. The fact `c_bits` is C(Y|X) in bits of the law that training answers are drawn from."""
        prompts = held_out_prompts(TASKS[self.operation], self.count, self.seed)
        return [Sample(i, prompt, {"c_bits": c_bits(self.operation, prompt)}) for i, prompt in enumerate(prompts)]

    def reference(self, sample: Sample) -> str:
        """See `Task.reference`. It is drawn as the answers of training are."""
        found = held_out_examples(TASKS[self.operation], self.seed)
        return next(answer for prompt, answer in found if prompt == sample.prompt)

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """`exact_match`, and what is wrong with a list, each 0 or 1."""
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


def c_bits(operation: str, prompt: str) -> float:
    """Conditional total correlation of the answer given the prompt, in bits: 0 where one answer is right."""
    if operation not in MANY:
        return 0.0
    if operation == "latin":
        return _correlation(_completions(prompt.partition(": ")[2]))
    items, _, extra = prompt.partition(": ")[2].partition("; ")
    names, verb = items.split(", "), operation.partition(" ")[0]
    if verb == "shuffle":
        # The law over orders of names that may repeat, without listing them: each place has the names' shares.
        counts = Counter(names).values()
        single = -sum(c / len(names) * log2(c / len(names)) for c in counts)
        orders = log2(_factorial(len(names))) - sum(log2(_factorial(c)) for c in counts)
        return len(names) * single - orders
    edits = {
        "insert": lambda at: [*names[:at], extra, *names[at:]],
        "remove": lambda at: names[:at] + names[at + 1 :],
        "replace": lambda at: [*names[:at], extra, *names[at + 1 :]],
    }
    return _correlation(Counter(tuple(edits[verb](at)) for at in range(len(names) + (verb == "insert"))))


def _factorial(n: int) -> int:
    return 1 if n < 2 else n * _factorial(n - 1)


def _completions(puzzle: str) -> Counter[tuple[str, ...]]:
    """All squares that fill a puzzle."""
    found: list[tuple[str, ...]] = [()]
    for row in puzzle.split(", "):
        rows = ["".join(one) for one in permutations("1234")]
        fits = [one for one in rows if all(given in ("_", cell) for given, cell in zip(row, one, strict=True))]
        found = [
            (*above, one)
            for above in found
            for one in fits
            if all(one[column] != other[column] for other in above for column in range(4))
        ]
    return Counter(tuple("".join(square)) for square in found)


def _correlation(law: Counter[tuple[str, ...]]) -> float:
    """Sum of the places' entropies less the joint one."""
    total = law.total()

    def entropy(counts: Mapping[Any, int]) -> float:
        return -sum(count / total * log2(count / total) for count in counts.values())

    single = 0.0
    for place in range(len(next(iter(law)))):
        here: Counter[str] = Counter()
        for outcome, count in law.items():
            here[outcome[place]] += count
        single += entropy(here)
    return max(0.0, single - entropy(law))
