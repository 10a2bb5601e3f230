"""Arguments of the benchmarks. A mistake prints its message and ends with status 2."""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from dllm_sampler.cli import terminal
from dllm_sampler.cli.terminal import Parser
from dllm_sampler.errors import UserError, unknown

Value = TypeVar("Value")


def positive(text: str) -> int:
    """Return a whole number from 1 to 2^31 - 1."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"should be a whole number from 1 to {2**31 - 1}, not {text!r}")
    return int(text)


def output(text: str) -> Path:
    """Return a file that `files.write` can write, through a temporary file in the same folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a file")
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: it is not a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{path} cannot be written: nothing may be written to the folder {path.parent}"
        )
    return path


def parser(doc: str | None) -> Parser:
    """Build the parser of a benchmark. Its `--help` begins with the docstring."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parsed(it: Parser, argv: Sequence[str] | None, **smoke: str | float) -> argparse.Namespace:
    """The arguments; with `--smoke` the defaults are `smoke`."""
    options = it.parse_args(argv)
    if options.smoke:
        it.set_defaults(**smoke)
        options = it.parse_args(argv)
    return options


def add_json(it: Parser) -> None:
    """Add the option `--json`: the file that every measurement is written to."""
    it.add_argument("--json", type=output, metavar="FILE", help="write every measurement to FILE (default: none)")


def add_smoke(it: Parser, does: str = "run tiny sizes on the CPU once, to see that it works") -> None:
    """Add the option `--smoke`, with what it `does` as its help."""
    it.add_argument("--smoke", action="store_true", help=does)


def check_gpu(it: Parser, options: argparse.Namespace, reason: str = "this measures a GPU") -> None:
    """End with a mistake in the arguments without a GPU, unless it is a smoke run."""
    if not options.smoke and not torch.cuda.is_available():
        it.error(f"{reason}, and torch finds none: run it on a machine with a GPU, or add --smoke")


def command(main: terminal.Main) -> Callable[..., int]:
    """`main`, which says what a user did wrong in a line, in the name of its file."""
    return terminal.command(Path(inspect.getfile(inspect.unwrap(main))).name)(main)


def accepted(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """An argument's type, of a function that raises `UserError`."""

    def value(text: str) -> Value:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, with commas between them."""
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"each {error}") from None


def quantity(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"should be a number above 0, not {text!r}")
    return number


def among(kind: str, choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Some of the choices, with commas between them."""
    known = list(choices)

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise unknown(kind, name, known)
        return text.split(",")

    return accepted(names)
