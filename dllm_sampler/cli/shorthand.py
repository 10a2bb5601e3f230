"""Fields of guides without the guide's name: `guide=regex guide.pattern=...` for `guide.regex.pattern=...`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dllm_sampler.errors import UserError

_GUIDES = re.compile(r"guide=(?:(\w+)|\[([\w\s,]+)\])")
_FIELD = re.compile(r"guide\.(\w+)=(.*)", re.DOTALL)


def spelled_out(words: Sequence[str], holders: Callable[[str, str], Sequence[str]]) -> list[str]:
    """The words of a command line, with the guide's name in front of each field that was written without it.

    It is the one guide of those that the words name, by `guide=A` or `guide=[A,B]`, which has such a field. A mapping
    stays: `guide.regex={...}` are the settings of a guide.

    Args:
        holders: of a group, the choices that have a field.

    Raises:
        UserError: several of the guides have the field.
    """
    chosen = guides(words)
    return [_spelled_out(word, chosen, holders) for word in words]


def guides(words: Sequence[str]) -> list[str]:
    """The guides that the last `guide=A` or `guide=[A,B]` of the words names; empty: there is none."""
    named = [match for word in words if (match := _GUIDES.fullmatch(word))]
    return [*dict.fromkeys(re.findall(r"\w+", named[-1][1] or named[-1][2]))] if named else []


def _spelled_out(word: str, chosen: Sequence[str], holders: Callable[[str, str], Sequence[str]]) -> str:
    match = _FIELD.fullmatch(word)
    if match is None or not chosen or (match[1] in chosen and match[2].startswith("{")):
        return word
    field, value = match.groups()
    having = [name for name in chosen if name in holders("guide", field)]
    if len(having) > 1:
        ways = " or ".join(f"guide.{name}.{field}" for name in having)
        raise UserError("option-ambiguous", f"guide.{field} could be that of several guides: say {ways}")
    return f"guide.{having[0]}.{field}={value}" if having else word
