"""Lists in answers: `["Ada Abbott", "Otto York"]`, read leniently and strictly, and the mistakes in them."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from string import whitespace

from dllm_sampler.eval.tasks.base import Answer


def written(items: Sequence[str]) -> str:
    """Return a list in the form that prompts show."""
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def loose(text: str) -> list[str]:
    """Return the items after the last `[`, up to the next `]`. Brackets and quotes may be missing."""
    inside = text.rpartition("[")[2].partition("]")[0]
    items = [item.strip(whitespace + '"') for item in inside.split(",")]
    return [item for item in items if item]


def strict(text: str) -> list[str] | None:
    """Return the items of the last list in a text, or None if its form is not exactly that of `written`."""
    _, opened, rest = text.rpartition("[")
    inside, closed, _ = rest.partition("]")
    if not opened or not closed or not re.fullmatch(r'"[^"]*"(, "[^"]*")*', inside):
        return None
    return inside[1:-1].split('", "')


def mistakes(
    found: Sequence[str], answer: Answer, known: Sequence[str], needed: Collection[str], room: int
) -> dict[str, float]:
    """Return the kinds of mistakes, each 0 or 1. Several may apply at once.

    `found` are the items read from the answer, `known` those that may appear, as often as they may, and `needed` those
    that must. An unfinished answer that fills the canvas (`room` tokens) is truncated, a shorter one ended too early.
    """
    unclosed = "]" not in answer.text.rpartition("[")[2]
    counts, allowed = Counter(found), Counter(known)
    halves = {half for item in known for half in item.split()}
    strange = [item for item in found if item not in allowed]
    mixed = [item for item in strange if item.split() and all(half in halves for half in item.split())]
    errors = {
        "truncated": unclosed and len(answer.ids) >= room,
        "early_end": unclosed and len(answer.ids) < room,
        "duplicate": any(counts[item] > allowed[item] for item in counts if item in allowed),
        "missing": any(item not in counts for item in needed),
        "mixed_name": bool(mixed),
        "unknown": len(strange) > len(mixed),
    }
    return {f"error_{name}": float(value) for name, value in errors.items()}
