"""Values of the command line that Hydra's grammar would read as something else, in quotes of that grammar."""

import json
import re
import shlex
from collections.abc import Callable, Sequence

from dllm_sampler.errors import short
from dllm_sampler.host.reading import load_json

# Fields that hold a regular expression, JSON, or a file: their signs are not Hydra's lists, mappings and sweeps.
FILES = ("guide.json_schema.schema", "guide.grammar.grammar")
TEXTS = ("guide.regex.pattern", "guide.json_schema.whitespace", *FILES)


def quoted(value: str, mark: str = "'") -> str:
    """`value` as a string of Hydra's grammar in quotes, single ones or the `mark`; interpolation switched off."""
    value = re.sub(rf"(\\*){mark}", lambda match: match[1] * 2 + "\\" + mark, value)
    value = re.sub(r"(\\+)\Z", lambda match: match[1] * 2, value).replace("${", r"\${")
    return f"{mark}{value}{mark}"


def as_text(key: str, value: str, readable: Callable[[str], bool]) -> str:
    """The value of a field of `TEXTS` as Hydra should read it: to the letter.

    Two kinds of values are not: one that is in quotes as a whole, which Hydra takes off, and a list of texts in
    quotes (of files also without them, of schemas also of mappings). `[a-z]` is a pattern, `["[a-z]", "b+"]` a list.

    Args:
        readable: whether Hydra's grammar can read a value.
    """
    if value == "null" or (value.startswith(("'", '"')) and readable(value)):
        return value
    if value.startswith(("[", "{")):
        try:
            parts = load_json(value)
        except ValueError:
            parts = None
        if isinstance(parts, list) and parts and all(isinstance(part, str | dict) for part in parts):
            return listed([part if isinstance(part, str) else json.dumps(part) for part in parts])
        of_hydra = re.match(r"\[\s*['\"]", value) or key in FILES  # a file's name does not begin like this
        if parts is None and of_hydra and readable(value):
            return value
    return quoted(value)


def listed(texts: Sequence[str]) -> str:
    """Texts as a list of Hydra's grammar."""
    return f"[{','.join(map(quoted, texts))}]"


def unreadable(word: str) -> str:
    """What is wrong with an override that Hydra's grammar cannot read, and how to write it."""
    key, _, value = word.partition("=")
    if len(word) > 1000:
        return f"cannot read the override {short(word)}"
    if value.startswith("["):
        way = f'quote each text of a list, as in {key}=\'["a b", "c"]\''
    elif re.search(r"['\"\\]|\$\{", value):
        way = f"quote its value, as in {_for_shell(key, value)}"
    else:
        way = f"quote its value, as in {key}='\"{value}\"'"
    return f"cannot read the override {word}: {way}, or put -- before it if it is a prompt"


def _for_shell(key: str, value: str) -> str:
    """An override with its value in quotes, as typed in a shell, in the fewest signs."""
    if "'" not in value:
        return shlex.quote(key + "=" + quoted(value, '"'))
    word = f"{key}={quoted(value)}"
    return shlex.quote(word) if re.search(r'["$`!]|\\\\', word) else f'"{word}"'
