"""The words of a command line, sorted into prompts, overrides and flags, and parsed by Hydra's grammar.

Values that this grammar would misread are quoted. A field of a guide may be typed without the guide's name:
`guide=regex guide.pattern=...` for `guide.regex.pattern=...`.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dllm_sampler import config
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.user_files import FLAG, choices, holders
from dllm_sampler.errors import UserError, short, unknown
from dllm_sampler.host.reading import load_json

FLAGS = {"-h": "help", "--help": "help", "--version": "version", "--info": "info"}

# Beginnings of Hydra's overrides: name=, group@package=, +name=, ++name=, ~name and ~name=. No space is allowed before
# the `=`, so that "2+2=4 ?" and "x = 3" stay prompts.
_NAME = r"[A-Za-z_][\w./@-]*"
_OVERRIDE = re.compile(rf"(\+\+?|~)?{_NAME}=|~{_NAME}\Z")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=\S*)?\Z")
MULTIRUN = ("-m", "--multirun")

# Fields with a regular expression, JSON or a file name, whose characters are not Hydra's syntax.
FILES = ("guide.json_schema.schema", "guide.grammar.grammar")
TEXTS = ("guide.regex.pattern", "guide.json_schema.whitespace", *FILES)

_GUIDES = re.compile(r"guide=(?:(\w+)|\[([\w\s,]+)\])")
_FIELD = re.compile(r"(\+{0,2}|~)guide\.(\w+)(=.*)?", re.DOTALL)

# Options with a path, a hub id or a text, whose commas and brackets are not Hydra's syntax.
_LETTERS = r"model|model\.path|target|separator|prompts_file|output|report|prefix|suffix|infill"
_PARSER = OverridesParser.create()
_LITERAL = re.compile(rf"({_LETTERS})=(?!null\Z|['\"])(.+)\Z", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """A sorted command line: the action (`run`, `help`, `version` or `info`), the prompts, the overrides."""

    action: str
    prompts: list[str]
    overrides: list[str]


def is_override(word: str) -> bool:
    """Return True if a word begins like an override. Any other word is a flag, `--` or a prompt."""
    return _OVERRIDE.match(word) is not None


def is_flag(word: str) -> bool:
    """Return True if a word has the form of a flag, whether or not the flag exists."""
    return _FLAG.match(word) is not None


def split(words: Sequence[str]) -> Arguments:
    """Sort the words of a command line. After `--` every word is a prompt.

    Raises:
        UserError: a flag is unknown, or two flags ask for different pages.
    """
    action, prompts, overrides = "run", [], []
    for place, word in enumerate(words):
        if word == "--":
            prompts += words[place + 1 :]
            break
        if word in FLAGS:
            if action not in ("run", FLAGS[word]):
                raise UserError("options-conflict", f"--{action} and {word} ask for different output. Remove one.")
            action = FLAGS[word]
        elif is_flag(word):
            raise _no_flag(word)
        elif is_override(word):
            overrides.append(word)
        else:
            prompts.append(word)
    return Arguments(action, prompts, overrides)


def _no_flag(word: str) -> UserError:
    """Return the error for an unknown flag. It suggests the option of that name, if there is one."""
    if word in MULTIRUN:
        return UserError(
            "flag-unknown", f"{word} is for several runs. Use dllm-eval, for example with scheduler=fixed,threshold."
        )
    name, _, value = word.lstrip("-").replace("-", "_").partition("=")
    if name in Options.__dataclass_fields__:
        value = value or ("true" if Options.__dataclass_fields__[name].default is False else "VALUE")
        return UserError("flag-unknown", f"{word} is not a flag. Write {name}={value}.")
    return UserError(
        "flag-unknown",
        f"{unknown('flag', word, [*FLAGS, FLAG])} Options are name=value. Put -- before a prompt that begins with -.",
    )


def literal(word: str) -> Sequence[str]:
    """Return an override with its value quoted for Hydra. A model without a YAML becomes two overrides."""
    key, _, value = word.partition("=")
    if key in TEXTS and value:
        return [f"{key}={as_text(key, value)}"]
    match = _LITERAL.match(word)
    if not match:
        return [word]
    key, value = match.groups()
    if key != "model":
        return [f"{key}={quoted(value)}"]
    if "," in value and {*value.split(",")} <= {*choices("model")}:  # several models: refused by `composition`
        return [word]
    if value in choices("model") and value != config.CHECKPOINT:  # a folder may have that name
        return [word]
    return [f"model={config.CHECKPOINT}", f"model.path={quoted(config.checkpoint(value))}"]


@lru_cache(4096)
def parse(word: str) -> Override:
    """Return an override as Hydra parses it. Results are cached, since a sweep repeats overrides.

    Raises:
        UserError: Hydra's grammar cannot read the word.
    """
    try:
        return _PARSER.parse_override(word)
    except (HydraException, RecursionError):
        raise UserError("option-syntax", unreadable(word)) from None


def readable(word: str) -> bool:
    """Return True if Hydra can read an override."""
    try:
        parse(word)
    except UserError:
        return False
    return True


def quoted(value: str, mark: str = "'") -> str:
    """Return `value` as a string of Hydra's grammar between two `mark`s, without interpolation."""
    value = re.sub(rf"(\\*){mark}", lambda match: match[1] * 2 + "\\" + mark, value)
    value = re.sub(r"(\\+)\Z", lambda match: match[1] * 2, value).replace("${", r"\${")
    return f"{mark}{value}{mark}"


def as_text(key: str, value: str) -> str:
    """Return the value of a field of `TEXTS`, quoted so that Hydra keeps every character.

    There are two exceptions. Hydra removes the quotes of a value that is quoted as a whole. A list of quoted texts
    stays a list, also one of mappings or of file names: `[a-z]` is a pattern, but `["[a-z]", "b+"]` is a list.
    """
    if value == "null" or (value.startswith(("'", '"')) and readable(f"{key}={value}")):
        return value
    if value.startswith(("[", "{")):
        try:
            parts = load_json(value)
        except ValueError:
            parts = None
        if isinstance(parts, list) and parts and all(isinstance(part, str | dict) for part in parts):
            return listed([part if isinstance(part, str) else json.dumps(part) for part in parts])
        of_hydra = re.match(r"\[\s*['\"]", value) or key in FILES  # a file's name does not begin like this
        if parts is None and of_hydra and readable(f"{key}={value}"):
            return value
    return quoted(value)


def listed(texts: Sequence[str]) -> str:
    """Return texts as a list of Hydra's grammar."""
    return f"[{','.join(map(quoted, texts))}]"


def unreadable(word: str) -> str:
    """Return the message about an override that Hydra's grammar cannot read, with a form that it can."""
    key, _, value = word.partition("=")
    if len(word) > 1000:
        return f"Cannot read the override {short(word)}. Quote its value."
    if value == "null" or not readable(f"{key}=null"):
        return f"Cannot read the override {word}: '{key}' is not a name. Write NAME=VALUE."
    if value.startswith("["):
        way = f'Quote each text of a list, as in {key}=\'["a b", "c"]\''
    elif re.search(r"['\"\\]|\$\{", value):
        way = f"Quote its value, as in {_for_shell(key, value)}"
    else:
        way = f"Quote its value, as in {key}='\"{value}\"'"
    return f"Cannot read the override {word}. {way}."


def _for_shell(key: str, value: str) -> str:
    """Return an override with its value in quotes, as it is typed in a shell."""
    if "'" not in value:
        return shlex.quote(key + "=" + quoted(value, '"'))
    word = f"{key}={quoted(value)}"
    return shlex.quote(word) if re.search(r'["$`!]|\\\\', word) else f'"{word}"'


def spelled_out(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `guide.FIELD=VALUE` completed to `guide.NAME.FIELD=VALUE`.

    NAME is the guide with such a field among those that `guide=A` or `guide=[A,B]` chooses. A word may begin with `+`,
    `++` or `~`. `guide.regex={...}`, with the settings of a chosen guide, is unchanged.

    Raises:
        UserError: several of the chosen guides have the field.
    """
    chosen = guides(words)
    return [_spelled_out(word, chosen) for word in words]


def guides(words: Sequence[str]) -> list[str]:
    """Return the names of guides in the last `guide=A` or `guide=[A,B]` of the words."""
    named = [match for word in words if (match := _GUIDES.fullmatch(word))]
    return [*dict.fromkeys(re.findall(r"\w+", named[-1][1] or named[-1][2]))] if named else []


def _spelled_out(word: str, chosen: Sequence[str]) -> str:
    match = _FIELD.fullmatch(word)
    if match is None or not chosen:
        return word
    sign, field, value = match[1], match[2], match[3] or ""
    if field in chosen and (sign or value.startswith("={")):
        return word
    having = [name for name in chosen if name in holders("guide", field)]
    if len(having) > 1:
        ways = " or ".join(f"guide.{name}.{field}" for name in having)
        raise UserError("option-ambiguous", f"guide.{field} is a field of several guides. Write {ways}.")
    return f"{sign}guide.{having[0]}.{field}{value}" if having else word
