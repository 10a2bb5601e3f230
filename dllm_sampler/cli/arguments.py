"""Which words of the command line are prompts, which are Hydra overrides, which are flags."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_sampler.cli.options import Options
from dllm_sampler.cli.user_files import FLAG
from dllm_sampler.errors import UserError, unknown

FLAGS = {"-h": "help", "--help": "help", "--version": "version", "--info": "info"}

# Hydra's own beginnings: name=, group@package=, +name=, ++name=, ~name and ~name=. No space may stand before the
# `=`, so that "2+2=4 ?" and "x = 3" stay prompts.
_NAME = r"[A-Za-z_][\w./@-]*"
_OVERRIDE = re.compile(rf"(\+\+?|~)?{_NAME}=|~{_NAME}\Z")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=\S*)?\Z")


MULTIRUN = ("-m", "--multirun")


@dataclass(frozen=True)
class Arguments:
    """A command line, sorted: what to do (`run`, `help`, `version`, `info`), the prompts, the overrides."""

    action: str
    prompts: list[str]
    overrides: list[str]


def is_override(word: str) -> bool:
    """Whether a word begins like an override; any other word is a prompt."""
    return _OVERRIDE.match(word) is not None


def is_flag(word: str) -> bool:
    """Whether a word is written like a flag, known or not."""
    return _FLAG.match(word) is not None


def split(words: Sequence[str]) -> Arguments:
    """Sort the words of a command line; after `--` every word is a prompt.

    Raises:
        UserError: an unknown flag, or two that ask for different pages.
    """
    action, prompts, overrides = "run", [], []
    for place, word in enumerate(words):
        if word == "--":
            prompts += words[place + 1 :]
            break
        if word in FLAGS:
            if action not in ("run", FLAGS[word]):
                raise UserError("options-conflict", f"--{action} and {word} are different pages. Remove one.")
            action = FLAGS[word]
        elif is_flag(word):
            raise _no_flag(word)
        elif is_override(word):
            overrides.append(word)
        else:
            prompts.append(word)
    return Arguments(action, prompts, overrides)


def _no_flag(word: str) -> UserError:
    """The error for a word that is written like a flag: what to write instead."""
    if word in MULTIRUN:
        return UserError(
            "flag-unknown", f"{word} is for several runs. Use dllm-eval, for example with scheduler=fixed,threshold."
        )
    name, _, value = word.lstrip("-").replace("-", "_").partition("=")
    if name in Options.__dataclass_fields__:
        value = value or ("true" if Options.__dataclass_fields__[name].default is False else "VALUE")
        return UserError("flag-unknown", f"{word} is no flag: options are written name=value, here {name}={value}")
    return UserError(
        "flag-unknown", f"{unknown('flag', word, [*FLAGS, FLAG])}. Options are name=value. Put a prompt after --."
    )
