"""End-of-text tokens: a model may have several, and each of them ends an answer."""

from collections.abc import Iterable

from torch import Tensor


def end_ids(given: int | Iterable[int]) -> tuple[int, ...]:
    """Return the ids of one end-of-text token or of several as a tuple, each once and in the order given."""
    return (given,) if isinstance(given, int) else tuple(dict.fromkeys(given))


def is_end(ids: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Return a bool tensor of the shape of `ids`: true where the token is one of `ends`.

    Compares with Python numbers, so that a step neither reads the device nor copies a tensor to it.
    """
    found = ids == ends[0]
    for end in ends[1:]:
        found = found | (ids == end)
    return found


def first_end(tokens: Iterable[int], ends: tuple[int, ...]) -> int | None:
    """Return the index of the first end-of-text token in a list of ids, or None if there is none."""
    return next((place for place, token in enumerate(tokens) if token in ends), None)
