"""Text of models, tokenizers and files on a terminal, which would obey the escape sequences in it."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

# C0 but tab and newline, DEL and C1, and the marks that turn the direction of a line around.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return a text with its control characters spelled out, as in `\x1b`; tabs and newlines stay."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a text, with control characters made visible on a terminal. Without `file` it goes to standard output."""
    file = sys.stdout if file is None else file
    if file is not None:  # a process may have none
        print(visible(text) if file.isatty() else text, file=file, flush=True)


def text(given: str, console: Console) -> Text:
    """Return a text for a rich console: as it is to pipes and files, visible on a terminal."""
    return Text(visible(given) if console.is_terminal else given)
