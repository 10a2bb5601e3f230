"""Regular expressions of users, compiled and searched within limits of time and memory."""

import re
from functools import lru_cache
from typing import Any

import regex

from dllm_sampler.errors import short

SECONDS = 5.0  # most time of one search
LARGEST = 100_000  # most characters and sets of a pattern after repeats such as (?:ab){3} are expanded
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<count>\d+)(?:,\d*)?\}|.", re.DOTALL)


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Any:
    """Return the compiled pattern.

    Raises:
        ValueError: the pattern is not a regular expression, or is too large.
    """
    if _size(pattern) > LARGEST:
        raise ValueError(f"its repeats expand to more than {LARGEST} characters")
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def matches(pattern: str, text: str) -> bool:
    """Return True if a pattern matches somewhere in a text.

    Raises:
        ValueError: as `compiled`.
        TimeoutError: the search took more than `SECONDS`.
    """
    try:
        return compiled(pattern).search(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise TimeoutError(
            f"the search for {short(pattern)} in {len(text)} characters took more than {SECONDS:g} s."
            " Avoid a repetition inside another, such as (a+)+."
        ) from None


def _size(pattern: str) -> int:
    """Return the number of characters and sets of a pattern with expanded repeats. Each one needs memory."""
    totals, last = [0], 0  # sizes of the open brackets; size of the part that a count would repeat
    for part in _PART.finditer(pattern):
        if part["count"] is not None:
            repeats = last * max(int(part["count"]) - 1, 0) if len(part["count"]) < 10 else LARGEST
            totals[-1] += repeats
            last += repeats
        elif part[0] == "(":
            totals.append(0)
        elif part[0] == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        else:
            totals[-1] += 1
            last = 1
    return sum(totals)
