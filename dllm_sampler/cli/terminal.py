"""Printing, argument parsing and exit statuses of commands.

Text of models, tokenizers and files may have escape sequences, which are made visible on a terminal.
"""

import errno
import json
import os
import re
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import NoReturn, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from dllm_sampler.errors import UserError

# C0 but tab and newline, DEL and C1, and the marks that turn the direction of a line around.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
COLUMN, WIDEST = 19, 120
# System errors of writing: a full disk, a quota, a size limit, an I/O error, a read-only file system.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
NARROWEST = 16  # characters that a column of words may be folded to

Main = Callable[[Sequence[str] | None], int]


def visible(text: str) -> str:
    r"""Return a text with its control characters spelled out, as in `\x1b`, except tabs and newlines."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a text, with control characters made visible on a terminal. Without `file` it goes to standard output."""
    file = sys.stdout if file is None else file
    if file is not None:  # a process may have no standard output
        print(visible(text) if file.isatty() else text, file=file, flush=True)


def text(given: str, console: Console) -> Text:
    """Return a text for a rich console, with control characters made visible on a terminal."""
    return Text(visible(given) if console.is_terminal else given)


def written(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if value == "???":  # Hydra's mark of a missing value
        return "FOLDER"
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else json.dumps(value)


def say(console: Console, text: str) -> None:
    """Print a text without markup or wrapping, with control characters made visible on a terminal."""
    console.print(visible(text) if console.is_terminal else text, markup=False, highlight=False, soft_wrap=True)


def row(console: Console, left: str, right: str, style: str = "", indent: int = 2, column: int = COLUMN) -> None:
    """Print two columns, the right one wrapped to the terminal. A `left` that is too long gets its own line."""
    name, width = " " * indent + left, max(min(console.width, WIDEST) - column, 20)
    lines = textwrap.wrap(right, width, break_long_words=False, break_on_hyphens=False) or [""]
    if left and right and len(name) >= column:
        lines.insert(0, "")
    for place, line in enumerate(lines):
        line, name = (visible(line), visible(name)) if console.is_terminal else (line, name)
        cells = Text((name if place == 0 else "").ljust(column) if line else name, "bold")
        console.print(cells.append(line and line, f"not bold {style}"), soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    title, cells: texts of the head and of the rows
    rank: columns of the highest rank are left out first on a narrow terminal. Those of rank 0 are always shown
    words: true for words, which are left-aligned and may be folded, false for numbers, which are not
    """

    title: str
    cells: Sequence[str]
    rank: int = 0
    words: bool = False


def show_table(columns: Sequence[Column], console: Console) -> list[str]:
    """Print a table, and return the titles of the columns that were left out.

    A console that is not a terminal becomes as wide as the table.
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
    """Return the characters that a table needs if columns of words are at most `most` wide."""
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


def ending(command: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Return the exit status of `run()`. A user's mistake prints a message on stderr, not a stack trace.

    Args:
        command: name of the command.
        run: runs the command and returns its exit status.
        interrupted: the message after Ctrl-C.
    """
    try:
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # an error at exit could not be reported
        return status
    except UserError as error:
        show(f"{command}: {' '.join(str(error).split())}", sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{command}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `dllm-sample ... | head -1`; the flush at exit has no reader
        _mute()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _mute()
        where = "standard output" if error.filename is None else error.filename
        show(
            f"{command}: {where} cannot be written ({error.strerror}). Check the path, the disk and the permissions.",
            sys.stderr,
        )
        return USER_ERROR


def _mute() -> None:
    """Discard output that is not written yet, since standard output fails."""
    with suppress(OSError, ValueError):  # standard output may have no file number in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(ArgumentParser):
    """A parser that reports a wrong argument like any other mistake."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UserError("option-syntax", f"{message.rstrip('.')}. See --help.")


def command(name: str) -> Callable[[Main], Callable[..., int]]:
    """Return a decorator that runs `main(arguments)` by `ending`, with `name` in messages."""

    def named(main: Main) -> Callable[..., int]:
        @wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            return ending(name, lambda: main(arguments))

        return run

    return named
