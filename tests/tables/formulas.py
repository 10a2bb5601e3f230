"""Closed forms for decoding with true marginals at temperature 1, in exact fractions, for any length.

m is what is still masked, k what a step commits. Derived by hand; the tests compare each with full enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb, factorial, floor, log, prod

Sizes = tuple[int, ...]


def evenly(n: int, k: int) -> Sizes:
    """k per step, the remainder last."""
    return tuple(min(k, n - start) for start in range(0, n, k))


def shuffle(sizes: Sequence[int]) -> Fraction:
    """No two of a step's k positions may draw the same of m items."""
    left, valid = sum(sizes), Fraction(1)
    for k in sizes:
        valid *= Fraction(factorial(left) // factorial(left - k), left**k)
        left -= k
    return valid


def replace_random(sizes: Sequence[int]) -> Fraction:
    """One step draws the new item once, all earlier ones never; what follows is certain."""
    if not sizes:
        return Fraction(0)
    m, k = sum(sizes), sizes[0]
    other = 1 - Fraction(1, m)
    return Fraction(k, m) * other ** (k - 1) + other**k * replace_random(sizes[1:])


def insert_l2r(sizes: Sequence[int]) -> Fraction:
    """A random insertion, decoded from left to right: the new item is still to come, or lies at place p of the step."""
    if not sizes:
        return Fraction(0)
    m, k = sum(sizes), sizes[0]
    later = Fraction(factorial(m - 1), factorial(m - 1 - k)) * insert_l2r(sizes[1:]) if k < m else Fraction(0)
    here = sum(Fraction(factorial(m - 1) * factorial(k - 1), factorial(m - 1 - p) * factorial(p)) for p in range(k))
    return (later + here) / m**k


def remove_l2r(sizes: Sequence[int]) -> Fraction:
    """A random removal, decoded from left to right; `sizes` sum to one less than the items."""
    if not sizes:
        return Fraction(1)
    m, k = sum(sizes), sizes[0]
    later = Fraction(factorial(m), factorial(m - k)) * remove_l2r(sizes[1:])
    here = sum(Fraction(factorial(m) * factorial(k), factorial(m - p) * factorial(p)) for p in range(k))
    return (later + here) / (m + 1) ** k


def insert_once(n: int) -> Fraction:
    """All at once: a product over places of what each allows."""
    return Fraction(factorial(n) * 2**n, (n + 1) ** (n + 1))


def remove_once(n: int) -> Fraction:
    """See `insert_once`."""
    return Fraction(factorial(n - 1) * 2 ** (n - 1), n ** (n - 1))


def moved_once(n: int) -> Fraction:
    """A shuffle that must not be the input, all at once: the permanent of the marginals, less the input itself."""
    total = factorial(n) - 1
    own, other = Fraction(factorial(n - 1) - 1, total), Fraction(factorial(n - 1), total)
    terms = (comb(n, j) * (own - other) ** j * other ** (n - j) * factorial(n - j) for j in range(n + 1))
    return sum(terms, Fraction(0)) - own**n


def greedy_replace_random(sizes: Sequence[int]) -> Fraction:
    """Every step but the last keeps the input's items; the last draws by ties of two, or misses."""
    return {1: Fraction(1), 2: Fraction(1, 2)}.get(sizes[-1], Fraction(0))


def threshold_shuffle(n: int, gamma: float) -> Sizes:
    """One per step until 1/m reaches the threshold, then all the rest."""
    rest = min(n, max(1, floor(1 / gamma)))
    return (1,) * (n - rest) + (rest,)


def factor_shuffle(n: int, factor: float) -> Sizes:
    """The largest j with (j + 1)(1 - 1/m) <= factor."""
    sizes: list[int] = []
    while (m := n - sum(sizes)) > 0:
        sizes.append(max(1, min(m, floor(factor * m / (m - 1)) - 1 if m > 1 else 1)))
    return tuple(sizes)


def bound_shuffle(n: int, gamma: float) -> Sizes:
    """Every position has entropy ln m, and the sum leaves the last one out."""
    sizes: list[int] = []
    while (m := n - sum(sizes)) > 0:
        sizes.append(min(m, 1 + floor(gamma / log(m))) if m > 1 else 1)
    return tuple(sizes)


def bound_replace_random(n: int, gamma: float) -> Sizes:
    """As long as the new item has not come every position has the entropy of a coin of 1/m."""
    sizes: list[int] = []
    while (m := n - sum(sizes)) > 0:
        coin = -(log(1 / m) / m + (1 - 1 / m) * log(1 - 1 / m)) if m > 1 else 0.0
        sizes.append(min(m, 1 + floor(gamma / coin)) if coin else m)
    return tuple(sizes)


def _binomial(m: int, j: int) -> Fraction:
    """The new item is drawn at j of m positions."""
    return comb(m, j) * Fraction(1, m) ** j * (1 - Fraction(1, m)) ** (m - j)


@cache
def threshold_replace_random(m: int, gamma: float) -> tuple[Fraction, Fraction]:
    """Validity and mean forwards of a threshold on sampled tokens: draws of the new item stay masked where rare."""
    if m == 1:
        return Fraction(1), Fraction(1)
    if 1 / m >= gamma:
        return (1 - Fraction(1, m)) ** (m - 1), Fraction(1)
    if 1 - 1 / m >= gamma:
        # j draws of the new item wait; where all are, one is committed all the same and the others are certain.
        valid, forwards = _binomial(m, m), Fraction(1) + _binomial(m, m)
        for j in range(1, m):
            below = threshold_replace_random(j, gamma)
            valid += _binomial(m, j) * below[0]
            forwards += _binomial(m, j) * below[1]
        return valid, forwards
    # One position per step, the surest: the new item only where nothing else was drawn; then the rest is certain.
    if m == 2:
        return Fraction(1), Fraction(2)  # both sure by a half: one is committed, and the other is certain
    here = _binomial(m, m)
    below = threshold_replace_random(m - 1, gamma)
    return here + (1 - here) * below[0], 1 + here + (1 - here) * below[1]


@cache
def lowconf_replace_random(sizes: Sizes) -> Fraction:
    """The k surest of sampled tokens per step: draws of the new item come last."""
    if not sizes:
        return Fraction(0)
    m, k = sum(sizes), sizes[0]
    if (m, k) == (2, 1):
        return Fraction(1)  # both sure by a half: one is committed, and the other is certain
    none = sum((_binomial(m, j) for j in range(m - k + 1)), Fraction(0))
    return none * lowconf_replace_random(sizes[1:]) + (_binomial(m, m - k + 1) if k else Fraction(0))


def parity(sizes: Sequence[int]) -> Fraction:
    """Only the last position is bound."""
    return Fraction(1) if sizes[-1] == 1 else Fraction(1, 2)


def all_equal(sizes: Sequence[int], symbols: int = 3) -> Fraction:
    """The first step alone must agree with itself."""
    return Fraction(1, symbols ** (sizes[0] - 1))


def double_factorial_ratio(n: int) -> Fraction:
    """(n-1)!! / n!!, a shuffle of an even n decoded in pairs."""
    return Fraction(prod(range(1, n, 2)), prod(range(2, n + 1, 2)))
