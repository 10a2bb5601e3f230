"""Ten operations on a waiting line of people: some have one right answer, some have many (arXiv 2510.04767).

Names, wording and code are our own, after the published description, so scores differ from published ones in detail.
Unlike the published prompts, ours say that positions count from 0. Sorting by last name is graded by last name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any, ClassVar

from typing_extensions import override

from dllm_sampler.errors import invalid
from dllm_sampler.eval.tasks import listing
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.drawn import Drawn, Prompt, chat
from dllm_sampler.eval.tasks.names import GIVEN, SURNAMES

FRAME = """People are queueing at the counter of a repair shop. This is the queue, whoever is next comes first:
{queue}
{task}
Answer with the new queue alone, written as a list in the same way."""


@dataclass
class WaitingLine(Drawn):
    """A list of full names and what to do with it, after one example.

    Args:
        items: lengths of the lists, which the samples take in turn.
        template: the user's message in other words, with `{queue}` and, if the operation has them, `{word}` (the new
            person) and `{index}` (the position). None means the message of this module.
    """

    task: ClassVar[str]
    adds: ClassVar[bool] = False  # the operation adds a new person

    items: tuple[int, ...] = (3, 4, 5, 6)
    template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.items or min(self.items) < 2 or max(self.items) > len(GIVEN):
            raise invalid("task.items", self.items, f"Set a list of numbers from 2 to {len(GIVEN)}, for example [3,4]")
        if self.template is None:
            return
        wanted = [name for name in ("queue", "word", "index") if f"{{{name}}}" in FRAME + self.task]
        try:
            found = {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}
        except ValueError:  # for example for a brace without its other one
            found = set()
        if found != set(wanted):
            way = f"Use {{{'}, {'.join(wanted)}}}, and write {{{{ and }}}} for braces of the text"
            raise invalid("task.template", self.template, way, "option-syntax")

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The length of the canvas: 32 tokens for lists of up to six names, else 128."""
        return 32 if max(self.items) <= 6 else 128

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw a queue, and an example with a queue of any of the lengths."""
        shown, right = self._case(rng, rng.choice(self.items))
        facts, _ = self._case(rng, self.items[index % len(self.items)])
        message = self._message(listing.written(facts["queue"]), facts["word"], facts["index"])
        example = self._message(listing.written(shown["queue"]), shown["word"], shown["index"])
        return chat(message, example, listing.written(right)), facts

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score` (1 if the list is right, read leniently), `score_strict` (its form, too), and the mistakes."""
        facts = sample.facts
        queue, word = list(facts["queue"]), str(facts["word"])
        found, exact = listing.loose(answer.text), listing.strict(answer.text)
        right = self.accepts(found, queue, word, facts["index"])
        strict = exact is not None and self.accepts(exact, queue, word, facts["index"])
        known = [*queue, word] if self.adds else queue
        errors = listing.mistakes(found, answer, known, self.needed(queue, word, facts["index"]), self.max_new_tokens)
        if right:
            errors = dict.fromkeys(errors, 0.0)
        order = not right and not any(errors.values())
        return {
            "score": float(right),
            "score_strict": float(strict),
            **errors,
            "error_operation": float(order),
            "error_format": float(right and not strict),
        }

    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        """Return a right answer. If there are several, `index` chooses one."""
        raise NotImplementedError

    def places(self, n: int) -> int:
        """Return the number of positions that the operation may name in a queue of n."""
        return n

    def accepts(self, found: list[str], queue: list[str], word: str, index: int) -> bool:
        """Return True if an answer is right."""
        return found == self.edit(queue, word, index)

    def needed(self, queue: list[str], word: str, index: int) -> Sequence[str]:
        """Return the people that every right answer contains."""
        return self.edit(queue, word, index)

    def _case(self, rng: Random, n: int) -> tuple[dict[str, Any], list[str]]:
        # No two of a list share a surname, so that sorting by it has one right answer.
        people = [
            f"{given} {last}"
            for given, last in zip(rng.choices(GIVEN, k=n + 1), rng.sample(SURNAMES, n + 1), strict=True)
        ]
        queue, word = people[:n], people[n]
        index = rng.randrange(self.places(n))
        facts = {"queue": queue, "word": word if self.adds else "", "index": index}
        return facts, self.edit(queue, word, index)

    def _message(self, queue: str, word: str, index: int) -> str:
        text = FRAME.replace("{task}", self.task) if self.template is None else self.template
        return text.format(queue=queue, word=word, index=index)


class Copy(WaitingLine):
    """The operation that leaves the list unchanged."""

    name = "copy"
    task = "Nobody has moved. Write the queue down once more, exactly as it is."

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return queue


class Reverse(WaitingLine):
    """The operation that reverses the list."""

    name = "reverse"
    task = "It was written down the wrong way round. Turn it around, so that the last person becomes the first."

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return queue[::-1]


@dataclass
class Sort(WaitingLine):
    """The operation that sorts the list by last name.

    Args:
        compat: grade by the whole name, first name first, as the published labels do, which contradicts the prompt.
    """

    name = "sort"
    task = "Put the people in alphabetical order of their last names."

    compat: bool = False

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return sorted(queue, key=None if self.compat else lambda person: person.split()[::-1])


class Shuffle(WaitingLine):
    """The operation that puts the list in any other order."""

    name, many = "shuffle", True
    task = "To be fair to everyone, put the people in a random order. It must not be the order they have now."

    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        """Return an order other than that of the queue, drawn by `index`."""
        order, rng = list(queue), Random(f"{index}/{'/'.join(queue)}")
        while order == queue:
            rng.shuffle(order)
        return order

    @override
    def accepts(self, found: list[str], queue: list[str], word: str, index: int) -> bool:
        return sorted(found) == sorted(queue) and found != queue


class ReplaceIndex(WaitingLine):
    """The operation that replaces the person at a given position by a new one."""

    name, adds = "replace_index", True
    task = "{word} takes the place of the person at position {index}. Positions count from 0."

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return [*queue[:index], word, *queue[index + 1 :]]


class ReplaceRandom(ReplaceIndex):
    """The operation that replaces any one person by a new one."""

    name, many = "replace_random", True
    task = "{word} takes the place of one person. Pick that person at random."

    def accepts(self, found: list[str], queue: list[str], word: str, index: int) -> bool:
        """Return True if the answer is the queue with one person replaced by the new one."""
        at = found.index(word) if word in found else len(queue)
        return at < len(queue) and found == self.edit(queue, word, at)

    @override
    def needed(self, queue: list[str], word: str, index: int) -> Sequence[str]:
        return [word]


class InsertIndex(WaitingLine):
    """The operation that inserts a new person at a given position."""

    name, adds = "insert_index", True
    task = (
        "{word} joins the queue at position {index}. Positions count from 0, and whoever stands there or behind moves"
        " back by one."
    )

    def places(self, n: int) -> int:
        """Return the number of positions, including the one after the last person."""
        return n + 1

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return [*queue[:index], word, *queue[index:]]


class InsertRandom(InsertIndex):
    """The operation that inserts a new person anywhere."""

    name, many = "insert_random", True
    task = "{word} joins the queue. Pick the position at random."

    def accepts(self, found: list[str], queue: list[str], word: str, index: int) -> bool:
        """Return True if the answer is the queue once the new person is removed from it."""
        if word not in found:
            return False
        at = found.index(word)
        return found[:at] + found[at + 1 :] == queue


class RemoveIndex(WaitingLine):
    """The operation that removes the person at a given position."""

    name = "remove_index"
    task = "The person at position {index} leaves. Positions count from 0."

    @override
    def edit(self, queue: list[str], word: str, index: int) -> list[str]:
        return queue[:index] + queue[index + 1 :]


class RemoveRandom(RemoveIndex):
    """The operation that removes any one person."""

    name, many = "remove_random", True
    task = "One person leaves. Pick that person at random."

    @override
    def accepts(self, found: list[str], queue: list[str], word: str, index: int) -> bool:
        return any(found == self.edit(queue, word, at) for at in range(len(queue)))

    def needed(self, queue: list[str], word: str, index: int) -> Sequence[str]:
        """Return an empty list, since anybody may leave."""
        return []
