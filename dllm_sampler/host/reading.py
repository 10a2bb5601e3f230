"""Reading of JSON that may be damaged."""

import json
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON or not UTF-8, or its brackets are nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:  # not a ValueError, which callers catch
        raise ValueError("lists and objects are nested too deeply") from None
