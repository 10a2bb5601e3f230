"""Tables that fit the terminal: columns are left out rather than numbers broken over lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dllm_sampler.cli.terminal import visible

NARROWEST = 16  # characters that a column of words may be folded to


@dataclass(frozen=True)
class Column:
    """A column of a table.

    title, cells: its texts
    rank: columns of a high rank are left out first on a narrow terminal; those of rank 0 are always shown
    words: aligned to the left, and folded on a narrow terminal; the others are numbers and never folded
    """

    title: str
    cells: Sequence[str]
    rank: int = 0
    words: bool = False


def show(columns: Sequence[Column], console: Console) -> list[str]:
    """Print a table, and return the titles of the columns that were left out.

    A console that is no terminal becomes as wide as the table needs.
    """
    if console.is_terminal:
        columns = [replace(one, cells=[*map(visible, one.cells)]) for one in columns]
    else:
        console.width = max(console.width, _width(columns, console, sys.maxsize))
    shown = list(columns)
    for column in sorted((one for one in columns if one.rank), key=lambda one: -one.rank):
        if _width(shown, console, NARROWEST) <= console.width:
            break
        shown.remove(column)
    console.print(_table(shown))
    return [column.title.strip() for column in columns if column not in shown]


def _width(columns: Sequence[Column], console: Console, most: int) -> int:
    """Characters that a table needs whose columns of words are at most so wide."""
    options = console.options.update(width=sys.maxsize)
    return console.measure(_table(columns, most), options=options).maximum


def _table(columns: Sequence[Column], most: int | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for one in columns:
        if one.words:
            table.add_column(Text(one.title), overflow="fold", max_width=most)
        else:
            table.add_column(Text(one.title), justify="right", no_wrap=True)
    for row in zip(*(one.cells for one in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
