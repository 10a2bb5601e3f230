"""What parallel decoding does to a law, by enumeration in exact fractions: short outputs only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import log2, prod
from typing import Literal

Outcomes = tuple[tuple[int, ...], ...]
Order = Literal["random", "l2r"]


@dataclass(frozen=True)
class Exact:
    """The outcome of decoding with true marginals.

    valid: probability that the result is an outcome of the law
    bits: KL of the decoded law from the true one's side, sum over steps of the conditional total correlation
    """

    valid: Fraction
    bits: float


def decode(outcomes: Outcomes, sizes: Sequence[int], order: Order = "random", *, greedy: bool = False) -> Exact:
    """Decode this many positions per step, in random order or from left to right.

    greedy: the best token instead of a draw, ties broken evenly and independently at each position
    """

    def parts(masked: tuple[int, ...], step: int) -> Iterable[tuple[int, ...]]:
        size = min(sizes[step], len(masked))
        return [masked[:size]] if order == "l2r" else combinations(masked, size)

    return _decode(outcomes, parts, greedy)


def decode_parts(outcomes: Outcomes, parts: Sequence[tuple[int, ...]]) -> Exact:
    """Decode the given positions at each step."""
    return _decode(outcomes, lambda masked, step: [parts[step]], greedy=False)


def _decode(outcomes: Outcomes, parts: object, greedy: bool) -> Exact:
    choose = parts

    @cache
    def walk(left: Outcomes, masked: tuple[int, ...], step: int) -> tuple[Fraction, float]:
        if not masked:
            return Fraction(1), 0.0
        valid, bits, count = Fraction(0), 0.0, 0
        for part in choose(masked, step):  # type: ignore[operator]
            count += 1
            laws = {place: _marginal(left, place) for place in part}
            said = {place: _best(law) for place, law in laws.items()} if greedy else laws
            rest = tuple(place for place in masked if place not in part)
            single = sum(-float(p) * log2(p) for law in laws.values() for p in law.values())
            bits += single - log2(len(left))
            for values, kept in _split(left, part):
                share = Fraction(len(kept), len(left))
                below = walk(kept, rest, step + 1)
                valid += prod((said[i].get(v, Fraction(0)) for i, v in zip(part, values, strict=True))) * below[0]
                bits += float(share) * (log2(len(kept)) + below[1])
        return valid / count, bits / count

    return Exact(*walk(outcomes, tuple(range(len(outcomes[0]))), 0))


def _marginal(left: Outcomes, place: int) -> dict[int, Fraction]:
    values = [outcome[place] for outcome in left]
    return {value: Fraction(values.count(value), len(values)) for value in set(values)}


def _best(law: dict[int, Fraction]) -> dict[int, Fraction]:
    best = [value for value, p in law.items() if p == max(law.values())]
    return {value: Fraction(1, len(best)) for value in best}


def _split(left: Outcomes, part: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Outcomes]]:
    """The outcomes that are left, by what stands at some places."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for outcome in left:
        groups.setdefault(tuple(outcome[place] for place in part), []).append(outcome)
    return ((values, tuple(kept)) for values, kept in groups.items())
