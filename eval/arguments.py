"""How the commands of this folder read their arguments."""

import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import NoReturn

from dllm_sampler.cli.terminal import ending
from dllm_sampler.errors import UserError

Main = Callable[[Sequence[str] | None], int]


class Parser(ArgumentParser):
    """Reports a wrong argument like any other mistake, in one sentence."""

    def error(self, message: str) -> NoReturn:
        """See `ArgumentParser.error`."""
        raise UserError("option-syntax", f"{message}; try --help")


def command(name: str) -> Callable[[Main], Callable[..., int]]:
    """Of a `main(arguments)`: it ends as `ending` says, in the name of the command."""

    def named(main: Main) -> Callable[..., int]:
        @wraps(main)
        def run(arguments: Sequence[str] | None = None) -> int:
            return ending(name, lambda: main(arguments))

        return run

    return named


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"should be a whole number of at least 1, not {text!r}")
    return int(text)


def output(text: str) -> Path:
    """A file that can be written, as `files.write` does: through a temporary file in the same folder."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise ArgumentTypeError(f"{path} cannot be written: it is no file")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{path} cannot be written: nothing may be written to the folder {path.parent}")
    return path
