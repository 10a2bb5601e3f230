"""Which of many combinations run by default: a sample drawn by one seed; the rest is slow (`pytest -m slow`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import combinations, product
from random import Random
from typing import Any, Generic, TypeVar

import pytest

SEED = 0
leaves_out_slow = False  # set by conftest.py, before the tests are collected
T = TypeVar("T")


def sample(items: Collection[T], meets: Callable[[T], Iterable[Hashable]], seed: object = SEED) -> Iterator[T]:
    """The items, in an order by chance, that meet something which none before them met."""
    met = set[Hashable]()
    for item in Random(f"{seed}").sample(list(items), len(items)):
        own = set(meets(item))
        if own - met:
            yield item
        met |= own


def sampled(
    items: Collection[T], meets: Callable[[T], Iterable[Hashable]] = lambda item: [None], name: Callable[[T], str] = str
) -> list[Any]:
    """The items for `parametrize`; all but a sample of them are slow. What they meet is by default one thing."""
    places = list(enumerate(items))
    chosen = {at for at, _ in sample(places, lambda pair: meets(pair[1]))}
    taken = [place for place in places if place[0] in chosen or not leaves_out_slow]
    return [pytest.param(it, id=name(it), marks=() if at in chosen else pytest.mark.slow) for at, it in taken]


def crossed(*axes: Collection[Any], together: int = 1) -> list[Any]:
    """The product of the axes for `parametrize`: each `together` values of different axes meet by default (0: one
    of all combinations runs).

    The keys of a mapping are the names of its values in the test's id.
    """

    def meets(chosen: tuple[tuple[str, Any], ...]) -> Iterable[Hashable]:
        return combinations([(axis, name) for axis, (name, _) in enumerate(chosen)], together)

    named = [[(str(one), axis[one] if isinstance(axis, Mapping) else one) for one in axis] for axis in axes]
    found = sampled(list(product(*named)), meets, lambda chosen: "-".join(name for name, _ in chosen))
    return [pytest.param(*(one for _, one in it.values[0]), id=it.id, marks=it.marks) for it in found]


class Draw(Generic[T]):
    """Hands out choices by chance, those that were handed out least before the others."""

    def __init__(self, choices: Collection[T], seed: object = SEED) -> None:
        self.random, self.left = Random(f"{seed}"), [(0, one) for one in choices]

    def __call__(self, fits: Callable[[T], bool] = lambda one: True) -> T:
        """One that fits."""
        self.random.shuffle(self.left)
        self.left.sort(key=lambda pair: pair[0])
        place = next(at for at, (_, one) in enumerate(self.left) if fits(one))
        count, one = self.left.pop(place)
        self.left.append((count + 1, one))
        return one
