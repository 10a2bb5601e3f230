"""Refuse impossible settings of plug-ins.

`name` is the setting as the user writes it, for example `scheduler.steps`.
"""

from collections.abc import Iterable
from math import inf
from typing import Any, TypeGuard, TypeVar, get_args

from dllm_sampler.errors import UserError

Inner = TypeVar("Inner")


def is_whole(value: object) -> TypeGuard[int]:
    """Return True for a whole number. Python counts true and false among them, and here they are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[int | float]:
    """Return True for a number, NaN and infinities included. True and false are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_switch(name: str, value: object) -> None:
    """Refuse anything but true or false: every other value would count as one of them."""
    if not isinstance(value, bool):
        raise UserError("option-type", f"{name} is {value!r}. Set true or false.")


def check_count(name: str, value: object, least: int = 1, *, most: int | None = None, optional: bool = False) -> None:
    """Refuse anything but a whole number from `least` to `most`; None passes where it is `optional`."""
    if optional and value is None:
        return
    if not is_whole(value) or value < least:
        null = ", or null" if optional else ""
        raise UserError("option-range", f"{name} is {value!r}. Set a whole number of at least {least}{null}.")
    if most is not None and value > most:
        raise UserError("option-range", f"{name} is {value}. Set at most {most}.")


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
    """Refuse NaN and anything but a number from `least` to `most`; None passes where it is `optional`.

    Args:
        what: what an error calls it, for example "a probability".
        finite: refuse infinity too.
    """
    if optional and value is None:
        return
    if is_real(value) and least <= value <= most and not (finite and abs(value) == inf):
        return
    what = "a finite number" if finite and what == "a number" else what
    span = f" between {least} and {most}" if most < inf else f" of at least {least}" if least > -inf else ""
    null = ", or null" if optional else ""
    raise UserError("option-range", f"{name} is {value!r}. Set {what}{span}{null}.")


def check_positive(name: str, value: Any, what: str = "a number", *, most: float | None = None) -> None:
    """Refuse anything but a finite number above 0, `most` at most."""
    if not is_real(value) or not 0 < value < inf or (most is not None and value > most):
        limit = "" if most is None else f", at most {most}"
        raise UserError("option-range", f"{name} is {value!r}. Set {what} above 0{limit}.")


def check_share(name: str, value: object, what: str = "a share") -> None:
    """Refuse anything but a number between 0 and 1."""
    check_number(name, value, what, most=1)


def check_inner(inner: Inner) -> Inner:
    """Return the scheduler inside another one. Refuses anything else; only a dict's `inner` may be a name."""
    if isinstance(inner, type) or not hasattr(inner, "tell"):
        raise UserError("option-type", f"scheduler.inner is {inner!r}. Give a Scheduler, for example FixedSteps().")
    return inner


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse what is none of the `choices`, a `Literal` of words."""
    words = get_args(choices)
    if value not in words:
        raise UserError("choice-unknown", f"{name} is {value!r}. Set {', '.join(words[:-1])} or {words[-1]}.")


def checked_tokens(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple; refuses anything but a list of whole numbers of at least 0."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray)
    ids: tuple[Any, ...] = tuple(value) if listed else ()
    if not listed or not all(is_whole(one) and one >= 0 for one in ids):
        raise UserError("option-type", f"{name} is {value!r}. Give a list of token ids, for example [198].")
    return ids


def check_text(name: str, text: str) -> None:
    """Refuse a text with half of a character, as a byte outside UTF-8 becomes on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("text-invalid", f"{name} is not valid Unicode. Save it as UTF-8.") from None
