"""Choice of the combinations that run by default: few that cover everything. The rest is slow (`pytest -m slow`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, chdir
from heapq import heapify, heappop, heappush
from itertools import combinations, islice, product
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

import pytest

SEED = 0
leaves_out_slow = False  # set by conftest.py, before the tests are collected
T = TypeVar("T")


def sample(
    items: Iterable[T],
    meets: Callable[[T], Iterable[Hashable]],
    seed: object = SEED,
    first: Callable[[T], bool] = lambda item: False,
) -> Iterator[T]:
    """Yield few items that together meet everything that any item meets.

    The next item is always the one that meets most of what is missing. Ties are broken by chance. Items that are
    `first` come before all others.
    """
    met, by_chance = set[Hashable](), list(items)
    Random(f"{seed}").shuffle(by_chance)
    own = [frozenset(meets(item)) for item in by_chance]
    waiting = [(not first(item), -len(own[rank]), rank) for rank, item in enumerate(by_chance)]
    heapify(waiting)
    while waiting:
        later, most, rank = heappop(waiting)
        missing = len(own[rank] - met)
        if missing == -most and missing:
            yield by_chance[rank]
            met |= own[rank]
        elif missing:  # fewer than when it was counted last
            heappush(waiting, (later, -missing, rank))


def sampled(
    items: Collection[T],
    meets: Callable[[T], Iterable[Hashable]] = lambda item: [None],
    name: Callable[[T], str] = str,
    first: Callable[[T], bool] = lambda item: False,
) -> list[Any]:
    """The items for `parametrize`; all but a sample of them are slow. What they meet is by default one thing."""
    places = list(enumerate(items))
    chosen = {at for at, _ in sample(places, lambda pair: meets(pair[1]), first=lambda pair: first(pair[1]))}
    taken = [place for place in places if place[0] in chosen or not leaves_out_slow]
    return [pytest.param(it, id=name(it), marks=() if at in chosen else pytest.mark.slow) for at, it in taken]


def sampled_rows(
    rows: Collection[tuple[Any, ...]],
    meets: Callable[[tuple[Any, ...]], Iterable[Hashable]] = lambda row: enumerate(map(str, row)),
) -> list[Any]:
    """The tuples for `parametrize` with several names; all but a sample are slow. Each value is met by default."""
    found = sampled(rows, meets, lambda row: "-".join(map(str, row)))
    return [pytest.param(*one.values[0], id=one.id, marks=one.marks) for one in found]


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


def few(names: str | tuple[str, ...], cases: Iterable[Any], count: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test. The first `count` cases run by default, and the others are slow."""
    found = [_values(case, names) for case in islice(cases, count if leaves_out_slow else None)]
    marks = [() if at < count else (pytest.mark.slow,) for at in range(len(found))]
    return pytest.mark.parametrize(names, [pytest.param(*one, marks=it) for one, it in zip(found, marks, strict=True)])


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test as one item, whose cases are subtests. Use it where an item costs more than its test.

    Each case has its own folder `tmp_path`, where it runs if the test does, and its own `monkeypatch`. `capsys` holds
    its output alone.
    Two decorators in a row cross their cases.
    """
    keys = (names,) if isinstance(names, str) else names
    own = [dict(zip(keys, _values(case, names), strict=True)) for case in cases]

    def folded(test: Callable[..., None]) -> Callable[..., None]:
        inner, before = getattr(test, "folded", (test, [{}]))
        every = [{**one, **other} for one in own for other in before]

        @functools.wraps(inner)
        def run(*instance: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, case in enumerate(every):
                name = "-".join(ascii(value)[:40] for value in case.values())  # half a character cannot be sent
                with subtests.test(name), ExitStack() as stack:
                    found = {**fixtures, **case}
                    if "monkeypatch" in fixtures:
                        found["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                    if "tmp_path" in fixtures:
                        found["tmp_path"] = fixtures["tmp_path"] / f"{number}"
                        found["tmp_path"].mkdir()
                        if Path.cwd() == fixtures["tmp_path"]:
                            stack.enter_context(chdir(found["tmp_path"]))
                    if "capsys" in fixtures:
                        fixtures["capsys"].readouterr()
                    inner(*instance, **found)

        parameters = inspect.signature(inner).parameters
        asked = [one for name, one in parameters.items() if name not in every[0]]
        del run.__wrapped__  # pytest would ask for the parameters of the test inside
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        fixtures = [one.replace(kind=one.kind if one.name == "self" else one.KEYWORD_ONLY) for one in asked]
        vars(run).update(folded=(inner, every), __signature__=inspect.Signature([*fixtures, subtests]))
        return run

    return folded


def _values(case: Any, names: str | tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of a case, as `parametrize` reads it."""
    if isinstance(case, type(pytest.param())):
        return tuple(case.values)
    return (case,) if isinstance(names, str) else tuple(case)
