"""`dllm-sample --help` and `--info`, written from the YAML files themselves, the user's own among them."""

import re
from collections.abc import Sequence

from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli import compose, recommended, user_files
from dllm_sampler.cli.explain import LIMITS, explain
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.terminal import row, say, written
from dllm_sampler.cli.words import Arguments, is_override
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.options import pages

ANY = "FOLDER ORG/NAME"  # models without a YAML

USAGE = """\
Sample from a masked-diffusion language model.

Usage: dllm-sample [PROMPT ...] [NAME=VALUE ...] [-- PROMPT ...]

  dllm-sample "reverse: Ada, Ben, Cal, Dan" stream=true
  dllm-sample "sort: Dan, Ada, Cal" scheduler.threshold=0.7 cache=dual
  dllm-sample "shuffle: Ada, Ben, Cal" temperature=1 top_p=0.9 seed=7
  dllm-sample prompts_file=prompts.jsonl output=samples.jsonl
  dllm-sample "copy: Ada" model=MY-DRAFTER target=MY-AR-MODEL draft_length=16
  echo "copy: Ada, Ben" | dllm-sample scheduler=fixed scheduler.steps=4
  dllm-sample "Why is the sky blue?" model=llada-8b chat=true max_new_tokens=256

A word that begins like an override (name=, +, ++, ~) sets an option;
any other word is a prompt, and so is every word after --. Without one, prompts
are read from a pipe, one a line. Answers go to stdout, one per prompt; the line
of figures, and errors, to stderr.
"""
PLUGINS = "Plug-ins: GROUP=NAME chooses one (* default), GROUP.FIELD=VALUE sets a field"
MORE = """\
  dllm-sample --help scheduler=klass   one: fields, paper, what it goes with
  dllm-sample --info scheduler         all of a group, each in a sentence
  dllm-sample --info                   all of all groups
"""
OPTIONS = "Options: NAME=VALUE"
ENDING = """\
Limits: rules that judge drawn tokens by confidence prefer likely answers
(--help scheduler). Most caches are approximate (--help cache). The product of
a sample's recorded probabilities is not its likelihood (docs/likelihood.md).
Flags: -h, --help   --version   --info   --config-dir DIR
Your own YAML files in ./conf/GROUP/ are choices too. One with the name of one
of ours is refused. --config-dir DIR names another folder (docs/security.md).
Exit status: 0, or 2 after a mistake in the input (a message on stderr), or
130 after Ctrl-C (what is done is printed).
"""
GROUPS = {
    "model": "what predicts",
    "scheduler": "what to ask and what to commit in a step",
    "blocks": "where blocks end, and which are open",
    "stop": "what an end-of-text token does",
    "cache": "which keys and values are reused",
    "guide": "how a token is chosen; several as guide=[A,B], in that order",
    "particles": "decode several rows for each prompt and return one",
    "experiment": "a recipe of all of these",
}


def defaults() -> dict[str, str]:
    """Return the choice of each group in `conf/sample.yaml`."""
    return config.defaults("sample")


def options() -> list[tuple[str, str, str]]:
    """Return the name, the default and the help of each option."""
    return [(name, "null" if one is None else written(one), about) for name, one, about in pages(Options)]


def show(arguments: Arguments, console: Console) -> None:
    """Print the page that `--help` or `--info` asks for.

    Args:
        arguments: the command line. Words that name a group, an option or a choice (`scheduler`, `seed`,
            `scheduler=klass`) ask for a page of their own; `--help` ignores prompts and values of
            other settings.
        console: where to print.

    Raises:
        UserError: a word names no group, option or choice. `--help` ignores words that look like prompts.
    """
    groups, chosen, named = _topics(arguments)
    for group in groups:
        show_group(console, group)
    for name in named:
        _option(console, *next(one for one in options() if one[0] == name))
    for group, name in chosen:
        explain(console, group, name)
    if groups or chosen or named:
        return
    if arguments.action == "help":
        show_help(console)
    else:
        for group in compose.GROUPS:
            show_group(console, group)
        say(console, "* is the default. Fields and what goes with what: dllm-sample --help GROUP=NAME")


def _topics(arguments: Arguments) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Return the groups, the choices and the options that the words of a command line name."""
    groups: list[str] = []
    chosen: list[tuple[str, str]] = []
    named: list[str] = []
    known = [name for name, _, _ in options()]
    for word in [*arguments.overrides, *arguments.prompts]:
        key, given, _ = word.partition("=")
        if key in compose.GROUPS and given:
            chosen += user_files.choices_of(word)
        elif word in compose.GROUPS:
            groups.append(word)
        elif word in known:
            named.append(word)
        elif found := [(group, word) for group in compose.GROUPS if word in user_files.choices(group)]:
            chosen += found
        elif arguments.action == "info" or _unheard_of(word, known):
            plugins = [name for group in compose.GROUPS for name in user_files.choices(group)]
            raise unknown(
                "group, option or plug-in",
                word if arguments.action == "info" or key in plugins else key,
                [*compose.GROUPS, *known, *plugins],
                "dllm-sample --help lists all",
            )
    return groups, chosen, named


def _unheard_of(word: str, options: Sequence[str]) -> bool:
    """Return True for a single word, or a setting that begins with no group, option or `hydra`."""
    if re.fullmatch(r"[\w.-]+", word):  # with --help a single word is not a prompt
        return True
    first = re.split(r"[.@=]", word.lstrip("+~"))[0]
    return is_override(word) and not word.startswith("hydra") and first not in [*compose.GROUPS, *options]


def check_topics(command: str, words: Sequence[str], form: str | None = "GROUP=NAME") -> None:
    """Refuse a word beside `--help` if the command has no page of that name.

    Args:
        command: name of the command.
        words: its command line.
        form: the words that name a page, or None if the command has a single page.

    Raises:
        UserError: a word is neither a flag nor a setting.
    """
    for word in words:
        if not word.startswith("-") and "=" not in word:
            way = f"Write {command} --help{f' {form}' if form else ''}"
            raise UserError("choice-unknown", f"--help {word}: this command has no such page. {way}.")


def show_help(console: Console) -> None:
    """Print the usage, the groups with their choices, and the options."""
    say(console, f"{USAGE}\n{PLUGINS}\n")
    for group in compose.GROUPS:
        names = [f"{name}*" if name == defaults()[group] else name for name in user_files.choices(group)]
        names = [ANY if name == config.CHECKPOINT else name for name in names]
        row(console, group, f"{GROUPS[group]}:", "italic")
        row(console, "", " ".join(names))
        for name, file in user_files.own(group).items():
            row(console, "", f"{name} is yours: {file}")
    say(console, f"\n{MORE}\n{OPTIONS}\n")
    for option in options():
        _option(console, *option)
    say(console, f"\n{ENDING}".rstrip("\n"))


def show_group(console: Console, group: str) -> None:
    """Print each choice of a group with its description, and with its file if it is the user's."""
    row(console, f"{group}=NAME", GROUPS[group], "italic", indent=0)
    for name in user_files.choices(group):
        mark = "*" if name == defaults()[group] else ""
        row(console, ANY if name == config.CHECKPOINT else f"{name}{mark}", user_files.about(group, name))
        if group == "model":
            recommended.show(console, name)
    if group in LIMITS:
        say(console, "")
        row(console, "Limits", LIMITS[group])
    say(console, "")


def _option(console: Console, name: str, default: str, comment: str) -> None:
    row(console, f"{name}={default}", comment, column=24)
