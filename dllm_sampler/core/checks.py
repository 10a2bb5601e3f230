"""Checks that refuse impossible settings of plug-ins with a `UserError`.

`name` is the setting as the user writes it, for example `scheduler.steps`.
"""

from collections.abc import Iterable
from math import inf
from typing import Any, TypeGuard, TypeVar, get_args

from dllm_sampler.errors import UserError, invalid

Inner = TypeVar("Inner")


def is_whole(value: object) -> TypeGuard[int]:
    """Return True if `value` is an int, but not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[int | float]:
    """Return True if `value` is an int or a float (NaN and infinities included), but not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_switch(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise invalid(name, value, "Set true or false", "option-type")


def check_count(name: str, value: object, least: int = 1, *, most: int | None = None, optional: bool = False) -> None:
    """Refuse anything but a whole number from `least` to `most`. None is allowed if the setting is `optional`."""
    if optional and value is None:
        return
    if not is_whole(value) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        null = ", or null" if optional else ""
        raise invalid(name, value, f"Set a whole number {span}{null}", exact=True)


def check_number(
    name: str,
    value: Any,
    what: str = "a number",
    *,
    least: float = 0,
    most: float = inf,
    finite: bool = False,
    optional: bool = False,
) -> None:
    """Refuse anything but a number from `least` to `most`. NaN is refused. None is allowed if it is `optional`.

    Args:
        what: name of the quantity in an error, for example "a probability".
        finite: refuse infinities too.
    """
    if optional and value is None:
        return
    if is_real(value) and least <= value <= most and not (finite and abs(value) == inf):
        return
    what = "a finite number" if finite and what == "a number" else what
    span = f" between {least} and {most}" if most < inf else f" of at least {least}" if least > -inf else ""
    null = ", or null" if optional else ""
    raise invalid(name, value, f"Set {what}{span}{null}")


def check_positive(name: str, value: Any, what: str = "a finite number", *, most: float | None = None) -> None:
    """Refuse anything but a finite number above 0 and at most `most`. `what` is as in `check_number`."""
    if not is_real(value) or not 0 < value < inf or (most is not None and value > most):
        limit = "" if most is None else f", at most {most}"
        raise invalid(name, value, f"Set {what} above 0{limit}")


def check_share(name: str, value: object, what: str = "a share") -> None:
    """Refuse anything but a number between 0 and 1. `what` is as in `check_number`."""
    check_number(name, value, what, most=1)


def check_inner(inner: Inner) -> Inner:
    """Return the inner scheduler of another one. Refuses a class and anything without a `tell`."""
    if isinstance(inner, type) or not hasattr(inner, "tell"):
        raise invalid("scheduler.inner", inner, "Give an instance of a Scheduler, as FixedSteps()", "option-type")
    return inner


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not one of the words of `choices`, a `Literal` type."""
    words = get_args(choices)
    if value not in words:
        raise invalid(name, value, f"Set {', '.join(words[:-1])} or {words[-1]}", "choice-unknown")


def checked_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple. Refuses anything but an iterable of whole numbers of at least 0."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray)
    ids: tuple[Any, ...] = tuple(value) if listed else ()
    if not listed or not all(is_whole(one) and one >= 0 for one in ids):
        raise invalid(name, value, "Give a list of token ids, for example [198]", "option-type")
    return ids


def check_text(name: str, text: str) -> None:
    """Refuse a text with a lone surrogate, for example from a command-line argument that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(
            "text-invalid", f"{name} contains {half!r}, half of a character (a lone surrogate). Pass text in UTF-8."
        ) from None
