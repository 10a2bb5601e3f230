"""Functions that a user names in a setting."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from dllm_sampler.errors import UserError


def function(what: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; its module is imported.

    Args:
        what: what an error calls it, `the reward` say.

    Raises:
        UserError: there is none.
    """
    try:
        found = resolve_name(name)
    except Exception as error:  # whatever the module does when it is imported
        raise UserError(f"{what} {name} cannot be had ({type(error).__name__}: {error})") from None
    if not callable(found):
        raise UserError(f"{what} {name} is no function but a {type(found).__name__}")
    return found
