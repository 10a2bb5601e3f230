"""SVDD on a toy, everything enumerated: the sampler's law, its soft value, and the law of a choice among M drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations, combinations_with_replacement, product
from math import exp, factorial, log, prod

import torch
from torch import Tensor

from dllm_sampler.eval.testbeds.laws import UNKNOWN, normalised

State = tuple[int, ...]  # a symbol for each position, or `UNKNOWN`
Value = Callable[[State], float]
Probabilities = dict[State, float]


@dataclass(frozen=True)
class Joint:
    """A joint law of `length` bits, drawn by chance, and a reward of each outcome."""

    length: int = 3
    seed: int = 0
    symbols: int = 2

    @property
    def outcomes(self) -> list[State]:
        return list(product(range(self.symbols), repeat=self.length))

    @property
    def weights(self) -> Tensor:
        drawn = torch.randn(len(self.outcomes), dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed))
        return torch.softmax(1.5 * drawn, 0)

    def marginals(self, known: Tensor, before: Tensor) -> Tensor:
        table = torch.tensor(self.outcomes)  # [O, N]
        agrees = ((known[:, None] == table) | (known[:, None] == UNKNOWN)).all(2)  # [R, O]
        onehot = torch.nn.functional.one_hot(table, self.symbols).double()
        return normalised(torch.einsum("ro,o,ons->rns", agrees.double(), self.weights, onehot))

    @cache  # noqa: B019 - a few dozen states
    def given(self, state: State) -> list[list[float]]:
        """The law of each position, given the symbols that stand."""
        return self.marginals(torch.tensor([state]), torch.zeros(1))[0].tolist()

    def reward(self, outcome: State) -> float:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return float(torch.randn(len(self.outcomes), generator=generator)[self.outcomes.index(outcome)])

    def fill(self, state: State) -> State:
        """The likeliest symbol at each unknown position."""
        best = [law.index(max(law)) for law in self.given(state)]
        return tuple(new if old == UNKNOWN else old for old, new in zip(state, best, strict=True))


@dataclass(frozen=True)
class Enumerated:
    """The sampler that commits `sizes[masks]` positions by chance, each by its own law, and what SVDD makes of it."""

    law: Joint
    sizes: tuple[tuple[int, int], ...]  # masks left, positions to commit

    @cache  # noqa: B019
    def kernel(self, state: State) -> Probabilities:
        """The law of the next state."""
        masks = [at for at, symbol in enumerate(state) if symbol == UNKNOWN]
        given, count = self.law.given(state), dict(self.sizes)[len(masks)]
        subsets, found = list(combinations(masks, count)), Counter[State]()
        for subset in subsets:
            for symbols in product(range(self.law.symbols), repeat=count):
                after = list(state)
                for at, symbol in zip(subset, symbols, strict=True):
                    after[at] = symbol
                chance = prod(given[at][symbol] for at, symbol in zip(subset, symbols, strict=True))
                found[tuple(after)] += chance / len(subsets)  # pyright: ignore - a share
        return dict(found)

    def base(self) -> Probabilities:
        """The sampler's law."""
        return self.run(self.kernel)

    def run(self, step: Callable[[State], Probabilities]) -> Probabilities:
        """The law of the outcome, where `step` has that of the next state."""
        laws: Probabilities = {(UNKNOWN,) * self.law.length: 1.0}
        while any(UNKNOWN in state for state in laws):
            after = Counter[State]()
            for state, chance in laws.items():
                for following, share in step(state).items():
                    after[following] += chance * share  # pyright: ignore - a share
            laws = dict(after)
        return laws

    def target(self, alpha: float) -> Probabilities:
        """The sampler's law times exp(reward / alpha)."""
        weight = {state: chance * exp(self.law.reward(state) / alpha) for state, chance in self.base().items()}
        return {state: one / sum(weight.values()) for state, one in weight.items()}

    def soft(self, state: State, alpha: float) -> float:
        """The exact soft value."""
        return alpha * log(self._mean(state, alpha))

    @cache  # noqa: B019
    def _mean(self, state: State, alpha: float) -> float:
        if UNKNOWN not in state:
            return exp(self.law.reward(state) / alpha)
        return sum(chance * self._mean(after, alpha) for after, chance in self.kernel(state).items())

    def guided(self, value: Value, alpha: float, candidates: int | None) -> Probabilities:
        """SVDD's law with M `candidates`, a sum over multisets of them; None: without end."""

        def step(state: State) -> Probabilities:
            kernel = self.kernel(state)
            if candidates is None:
                weight = {after: chance * exp(value(after) / alpha) for after, chance in kernel.items()}
                return {after: one / sum(weight.values()) for after, one in weight.items()}
            found, values = Counter[State](), {after: value(after) for after in kernel}
            for drawn in combinations_with_replacement(kernel, candidates):
                counts, top = Counter(drawn), max(values[one] for one in drawn)
                chance = float(factorial(candidates))
                for one, count in counts.items():
                    chance *= kernel[one] ** count / factorial(count)
                shares = {
                    one: count * (exp((values[one] - top) / alpha) if alpha else float(values[one] == top))
                    for one, count in counts.items()
                }
                for one, share in shares.items():
                    found[one] += chance * share / sum(shares.values())  # pyright: ignore - a share
            return dict(found)

        return self.run(step)


def divergence(one: Probabilities, other: Probabilities) -> float:
    """KL(one || other) in nats."""
    return sum(p * log(p / other[state]) for state, p in one.items() if p > 0)
