"""Combinations by turns: every n-th of a product runs by default, so chosen that values meet; the rest is slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import pytest


def by_turns(share: int, *axes: Collection[Any]) -> list[Any]:
    """The product of the axes for `parametrize`; of a mapping the keys are names in the test's id.

    Every value runs by default. Any two values of different axes meet by default if the others can make up the rest:
    the places of the others must sum to anything modulo `share`, as those of one axis of `share` values do.
    """
    found = []
    for chosen in product(*(enumerate(named(axis)) for axis in axes)):
        slow = sum(place for place, _ in chosen) % share > 0
        values = [value for _, (_, value) in chosen]
        name = "-".join(name for _, (name, _) in chosen)
        found.append(pytest.param(*values, id=name, marks=pytest.mark.slow if slow else ()))
    return found


def named(axis: Collection[Any]) -> list[tuple[str, Any]]:
    """The values of an axis, each with its name."""
    if isinstance(axis, Mapping):
        return [(str(name), value) for name, value in axis.items()]
    return [(str(value), value) for value in axis]
