"""How pages of a command are printed: names on the left, what they mean on the right."""

from __future__ import annotations

import json
import re
import textwrap

from rich.console import Console
from rich.text import Text

from dllm_sampler import config
from dllm_sampler.cli import user_files
from dllm_sampler.cli.terminal import visible
from dllm_sampler.errors import UserError, first_line

COLUMN, WIDEST = 19, 120
_BEGINNING = 10_000  # characters of a file of the user's in which its first comment is looked for


def about(group: str, name: str) -> str:
    """What the first comment of a choice's YAML says; of a user's own its file, too."""
    own = user_files.own(group).get(name)
    try:
        user_files.check(group, name)
        if own is None:
            return config.entry(group, name).about
        with own.open(encoding="utf-8") as lines:
            said = config.comment(lines.read(_BEGINNING))
    except UserError as error:
        return str(error)
    except (OSError, ValueError) as error:  # no file any more, or no UTF-8
        return f"{own} cannot be read: {first_line(error)}"
    return f"{said} [yours: {own}]".lstrip()


def written(value: object) -> str:
    """A value as the command line has it."""
    if value == "???":  # Hydra's word for what must be given
        return "FOLDER"
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else json.dumps(value)


def say(console: Console, text: str) -> None:
    """Print text as it is."""
    console.print(visible(text) if console.is_terminal else text, markup=False, highlight=False, soft_wrap=True)


def row(console: Console, left: str, right: str, style: str = "", indent: int = 2, column: int = COLUMN) -> None:
    """Print two columns, the right one wrapped to the terminal; a name too long for the left stands above it."""
    name, width = " " * indent + left, max(min(console.width, WIDEST) - column, 20)
    lines = textwrap.wrap(right, width, break_long_words=False, break_on_hyphens=False) or [""]
    if left and right and len(name) >= column:
        lines.insert(0, "")
    for place, line in enumerate(lines):
        line, name = (visible(line), visible(name)) if console.is_terminal else (line, name)
        text = Text((name if place == 0 else "").ljust(column) if line else name, "bold")
        console.print(text.append(line and line, f"not bold {style}"), soft_wrap=True, highlight=False)
