"""Tables in a document, between `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dllm_sampler.errors import UserError

ENOUGH = 8  # runs from which a range is told: of fewer it says too little


def spread(values: Sequence[float], digits: int) -> str:
    """The mean of runs that differ by their seed; `(lowest to highest)` too, where they are enough."""
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) < ENOUGH else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    cells = [list(head), *map(list, rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def tables(text: str) -> list[list[list[str]]]:
    """The rows of each table in `text`, its head first, without the ruler."""
    found = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    lines = [table.splitlines() for table in found]
    return [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows[:1] + rows[2:]]
        for rows in lines
    ]


def section(text: str, name: str) -> str | None:
    """What stands between the marks, None without them."""
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    return found and found[1]


def fill(text: str, name: str, content: str) -> str:
    """The document with new content between the marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def read(path: Path, *names: str) -> str:
    """A document that has all these sections.

    Raises:
        UserError: it cannot be read, or lacks one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    for name in names:
        if section(text, name) is None:
            raise UserError(
                "made-up", f"{path} has no place for the results: it needs lines <!-- {name} --> and <!-- /{name} -->"
            )
    return text
