"""How the commands of this folder read their arguments."""

import os
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import NoReturn

from dllm_sampler.errors import UserError


class Parser(ArgumentParser):
    """Reports a wrong argument like any other mistake, in one sentence."""

    def error(self, message: str) -> NoReturn:
        """See `ArgumentParser.error`."""
        raise UserError(f"{message}; try --help")


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
