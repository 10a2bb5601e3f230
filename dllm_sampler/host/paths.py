"""Paths as users write them."""

from __future__ import annotations

import os
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path

from dllm_sampler.errors import UserError, short


def expanded(what: str, given: str | PathLike[str]) -> Path:
    """Return a valid path with the home folder in place of `~`, whether or not it exists.

    Args:
        what: what an error calls it: the setting, as in `output`.
        given: the path.

    Raises:
        UserError: an empty path, an unknown user's home folder, or an invalid path, for example too long a name.
    """
    if not fspath(given):
        raise UserError("path-invalid", f"{what} is empty. Name a path.")
    try:
        path = Path(given).expanduser()
    except RuntimeError:
        user = Path(given).parts[0]
        raise UserError(
            "path-invalid", f"{what}={short(fspath(given))}: {short(user)} is unknown. Correct it."
        ) from None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # to be written, or for the caller to complain about
            os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            "path-invalid", f"{what}={short(fspath(given))} is not a path ({reason}). Correct it."
        ) from None
    return path
