"""How the commands of this folder read their arguments."""

from argparse import ArgumentParser, ArgumentTypeError
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
