"""Regular expressions of users: the search of each ends after some seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

from dllm_sampler.errors import short

SECONDS = 5.0  # most time of one search


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Any:
    """Return the compiled pattern.

    Raises:
        ValueError: it is not a regular expression.
    """
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
            " Write it without one repetition inside another, as in (a+)+"
        ) from None
