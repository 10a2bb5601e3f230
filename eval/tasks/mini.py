"""The operations of the shipped model, on prompts that training never saw: ParallelBench's finding on a laptop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import log2
from random import Random
from typing import Any, Literal

from dllm_sampler.errors import unknown
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.drawn import Drawn, Prompt
from dllm_sampler.training.tasks import TASKS, draw_example

# Several answers are right. The steps of a sum determine one another, but its C(Y|X) is 0: the prompt determines all.
MANY = ("shuffle", "insert randomly", "remove randomly", "replace randomly", "latin")


@dataclass
class Mini(Drawn):
    """One operation of `mini`.

    Args:
        operation: its name, as in the model's card.
    """

    operation: str = "shuffle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operation not in TASKS:
            raise unknown("operation of mini", self.operation, TASKS)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By the operation."""
        return f"mini_{self.operation.replace(' ', '_')}"

    @property
    def dependency(self) -> Literal["none", "high"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By the number of right answers."""
        return "high" if self.operation in MANY else "none"

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """A held-out prompt; `c_bits` is C(Y|X) in bits of the law its training answers are drawn from."""
        prompt, _ = draw_example(TASKS[self.operation].draw, rng, held=True)
        return prompt, {"prompt": prompt, "c_bits": c_bits(self.operation, prompt)}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """`score`: the answer is right; what is wrong with a list where there is one."""
        prompt = str(sample.facts["prompt"])
        right = TASKS[self.operation].check(prompt, answer.text)
        found = {"score": float(right)}
        if ": " in prompt and self.operation not in ("arithmetic", "latin", "json", "brackets"):
            items, _, extra = prompt.partition(": ")[2].partition("; ")
            known, names = Counter([*items.split(", "), *([extra] if extra else [])]), answer.text.split(", ")
            counts = Counter(names)
            lost = sum((known - counts).values()) - self.operation.startswith(("remove", "replace"))
            found |= {
                "error_duplicate": float(any(count > known[name] > 0 for name, count in counts.items())),
                "error_missing": float(not right and lost > 0),
                "error_unknown": float(any(name not in known for name in names)),
            }
        return found | {"error_truncated": float(not right and len(answer.ids) >= self.max_new_tokens)}


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
