"""Checks of paths in settings."""

import os
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path

from dllm_sampler.errors import UserError, short


def expanded(what: str, given: str | PathLike[str]) -> Path:
    """Return a valid path with the home folder in place of `~`, whether or not it exists.

    Args:
        what: name of the setting in errors, for example `output`.
        given: the path as typed.

    Raises:
        UserError: the path is empty or invalid, for example too long, or `~USER` names an unknown user.
    """
    if not fspath(given):
        raise UserError("path-invalid", f"{what} is empty. Name a path.")
    try:
        path = Path(given).expanduser()
    except RuntimeError:
        user = Path(given).parts[0]
        raise UserError(
            "path-invalid",
            f"{what}={short(fspath(given))}: the home folder of {short(user)} is unknown. Write the whole path.",
        ) from None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # the path need not exist
            os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            "path-invalid", f"{what}={short(fspath(given))} cannot be used ({reason}). Correct it."
        ) from None
    return path
