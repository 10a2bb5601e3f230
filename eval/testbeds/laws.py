"""Joint laws of N tokens whose conditional marginals are exact: the operations on lists, latin squares, parity.

Symbols are numbered from 0. In a list operation on n items the input is 0 ... n-1 and the new item is n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations, product
from math import factorial, lgamma, log, log2
from typing import Protocol

import torch
from torch import Tensor

UNKNOWN = -1  # the value of a position whose symbol is undecided


class Law(Protocol):
    """The law of `length` tokens over `symbols` symbols."""

    @property
    def length(self) -> int:
        """The number of tokens N."""
        ...

    @property
    def symbols(self) -> int:
        """The number of symbols S."""
        ...

    def marginals(self, known: Tensor, before: Tensor) -> Tensor:
        """Return the exact law of each position given the others.

        Args:
            known: `[R, N] int64` symbols, `UNKNOWN` where undecided.
            before: `[R]` the token before the first position.

        Returns:
            `[R, N, S] float64`; uniform in rows that no outcome agrees with (their values are ignored).
        """
        ...


def normalised(weight: Tensor) -> Tensor:
    """Return `[..., S]` weights as probabilities, uniform where all are 0."""
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total.clamp(min=torch.finfo(weight.dtype).tiny), 1 / weight.shape[-1])


@dataclass(frozen=True)
class Listed:
    """The uniform law over a list of outcomes, which is not empty."""

    outcomes: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """The number of tokens N."""
        return len(self.outcomes[0])

    @property
    def symbols(self) -> int:
        """The number of symbols S."""
        return 1 + int(self.table.max())

    @cached_property
    def table(self) -> Tensor:
        """The outcomes `[M, N] int64`."""
        return torch.tensor(self.outcomes)

    @cached_property
    def _onehot(self) -> Tensor:
        return torch.nn.functional.one_hot(self.table, self.symbols).double().flatten(1)  # [M, N*S]

    def marginals(self, known: Tensor, before: Tensor) -> Tensor:
        """Return the exact law of each position given the others, as `Law.marginals` describes."""
        agrees = torch.ones(known.shape[0], len(self.outcomes), dtype=torch.bool, device=known.device)
        for place, column in enumerate(self.table.to(known.device).T):
            seen = known[:, place, None]
            agrees &= (seen == column) | (seen == UNKNOWN)
        weight = agrees.double() @ self._onehot.to(known.device)
        return normalised(weight.view(known.shape[0], self.length, self.symbols))

    def valid(self, ids: Tensor) -> Tensor:
        """Return `[R] bool`: True for rows of `ids [R, N]` that are outcomes."""
        return (ids[:, None] == self.table.to(ids.device)).all(-1).any(-1)

    @cached_property
    def c_bits(self) -> float:
        """Conditional total correlation in bits: KL(law || product of its marginals), the least for any product."""
        single = self.marginals(torch.full((1, self.length), UNKNOWN), torch.zeros(1))[0]
        return float(torch.special.entr(single).sum()) / log(2) - log2(len(self.outcomes))


@dataclass(frozen=True)
class Shuffle:
    """The uniform law over the orders of 0 ... n-1. No list of them is made, so n may be large.

    n: number of items, at least 2 if `moved`
    moved: leave out the order of the input
    """

    n: int
    moved: bool = False

    @property
    def length(self) -> int:
        """The number of tokens N."""
        return self.n

    @property
    def symbols(self) -> int:
        """The number of symbols S."""
        return self.n

    def marginals(self, known: Tensor, before: Tensor) -> Tensor:
        """Return the exact law of each position given the others, as `Law.marginals` describes."""
        item = torch.arange(self.n, device=known.device)
        placed = known[:, :, None] == item  # [R, N, S]
        undecided = known == UNKNOWN  # [R, N]
        twice = (placed.sum(1) > 1).any(1)
        weight = (~placed.any(1) & ~twice[:, None])[:, None].expand_as(placed).double()
        if self.moved:
            # With m undecided positions m! orders are possible, less one while all decided items are where they were.
            still = ((known == item) | undecided).all(1)  # [R]
            left = undecided.sum(1).clamp(min=1)
            own = -torch.lgamma(left.double()).exp().reciprocal()  # the input's order, in units of (m-1)!
            weight = weight + torch.where(still[:, None, None], own[:, None, None] * torch.eye(self.n), 0.0) * (
                weight > 0
            )
        return normalised(torch.where(undecided[..., None], weight, placed.double()))

    def valid(self, ids: Tensor) -> Tensor:
        """Return `[R] bool`: True for rows of `ids [R, N]` that are outcomes."""
        item = torch.arange(self.n, device=ids.device)
        right = (ids.sort(1).values == item).all(1)
        return right & (ids != item).any(1) if self.moved else right

    @property
    def c_bits(self) -> float:
        """Conditional total correlation in bits, as for `Listed`."""
        if not self.moved:
            return self.n * log2(self.n) - lgamma(self.n + 1) / log(2)
        total = factorial(self.n) - 1
        own, other = (factorial(self.n - 1) - 1) / total, factorial(self.n - 1) / total
        single = -(own * log2(own) if own else 0) - (self.n - 1) * other * log2(other)
        return self.n * single - log2(total)


def _at_each(n: int, places: int, edit: Callable[[list[int], int], Sequence[int]]) -> Listed:
    return Listed(tuple(tuple(edit(list(range(n)), place)) for place in range(places)))


@cache
def latin_squares(n: int) -> Listed:
    """Return the uniform law over latin squares of side n, each written row after row."""
    rows = list(permutations(range(n)))
    squares = [
        sum(square, ())
        for square in product(rows, repeat=n)
        if all(len(set(column)) == n for column in zip(*square, strict=True))
    ]
    return Listed(tuple(squares))


# The law of each operation on n items, n at least 2.
LAWS: dict[str, Callable[[int], Listed | Shuffle]] = {
    "copy": lambda n: Listed((tuple(range(n)),)),
    "reverse": lambda n: Listed((tuple(range(n))[::-1],)),
    "shuffle": Shuffle,
    "shuffle_not_identity": lambda n: Shuffle(n, moved=True),
    "replace_random": lambda n: _at_each(n, n, lambda x, i: [*x[:i], n, *x[i + 1 :]]),
    "insert_random": lambda n: _at_each(n, n + 1, lambda x, i: [*x[:i], n, *x[i:]]),
    "remove_random": lambda n: _at_each(n, n, lambda x, i: [*x[:i], *x[i + 1 :]]),
    "even_parity": lambda n: Listed(tuple(bits for bits in product((0, 1), repeat=n) if sum(bits) % 2 == 0)),
    "all_equal3": lambda n: Listed(tuple((symbol,) * n for symbol in range(3))),
    "latin_square": latin_squares,
}
