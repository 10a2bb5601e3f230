"""Regular expressions of users: each is compiled and searched within bounds of time and memory."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import regex

from dllm_sampler.errors import short

SECONDS = 5.0  # most time of one search
LARGEST = 100_000  # characters and sets of a pattern once its counts, as in (?:ab){3}, are written out
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<count>\d+)(?:,\d*)?\}|.", re.DOTALL)


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Any:
    """Return the compiled pattern.

    Raises:
        ValueError: it is not a regular expression, or too large.
    """
    if _size(pattern) > LARGEST:
        raise ValueError(f"its counts make more than {LARGEST} characters of it")
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it has too many brackets inside each other") from None


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
            f"the pattern {short(pattern)} was searched for more than {SECONDS:g} s in {len(text)} characters."
            " Write it without one repetition inside another, as in (a+)+."
        ) from None


def _size(pattern: str) -> int:
    """Count the parts of a pattern whose counts are written out: compiling takes memory for each."""
    totals, last = [0], 0  # of each open bracket; of the part that a count would repeat
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
