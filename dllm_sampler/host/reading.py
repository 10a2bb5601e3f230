"""JSON that somebody may have written by hand, or damaged."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or has more brackets inside each other than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:  # not a ValueError: a caller that expects a damaged file would miss it
        raise ValueError("lists and objects are nested too deeply") from None
