"""Mask predictors in closed form, on which every answer can be scored, and the rules of `unit/data/duel.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import product
from math import cos, exp, log, sin
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import Sampler
from dllm_sampler.result import Scores

Row = tuple[int, ...]


class Bed:
    """`length` positions of `symbols` tokens. The mask is number `symbols`, and the prompt's token the next one."""

    length: int
    symbols: int

    def law(self, row: Row, at: int) -> list[float]:
        """Return the probabilities of the tokens at a masked position. They need no sum of 1."""
        raise NotImplementedError

    @cached_property
    def answers(self) -> list[Row]:
        """Every answer."""
        return list(product(range(self.symbols), repeat=self.length))

    @cached_property
    def table(self) -> Tensor:
        """`[S, L, V]` logits for every state. A state is a number whose digits are its tokens, the last one first."""
        states = product(range(self.symbols + 1), repeat=self.length)
        rows = [[[log(p) for p in self.law(row[::-1], at)] for at in range(self.length)] for row in states]
        return torch.tensor(rows, dtype=torch.float64)

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return `[B, L, V]` logits for `Sampler.from_callable`. The prompt is one token."""
        place = (self.symbols + 1) ** torch.arange(self.length)
        found = self.table[(ids[:, 1 : self.length + 1] * place).sum(1)]
        out = torch.full((*ids.shape, self.symbols + 2), -1e30, dtype=torch.float64)
        out[:, 1 : self.length + 1, : self.symbols] = found
        return out

    def sampler(self, **options: Any) -> Sampler:
        """Return a sampler that decodes the whole answer."""
        tokens = {"vocab_size": self.symbols + 2, "mask_id": self.symbols, "eos_id": self.symbols + 1}
        chosen = {"stop": "none", "blocks": "full", "temperature": 1.0, "dtype": "float64", **options}
        return Sampler.from_callable(self.logits, **tokens, **chosen)

    def score(self, answers: Sequence[Row] | None = None, **options: Any) -> Scores:
        """Return the scores of answers, by default of all."""
        rows = [list(row) for row in (self.answers if answers is None else answers)]
        return self.sampler(**options).score([[self.symbols + 1]], rows, batch_size=len(rows))


class Waves(Bed):
    """Its conditionals belong to no joint law, as those of a network do not."""

    length, symbols = 4, 3

    def law(self, row: Row, at: int) -> list[float]:
        def logit(symbol: int) -> float:
            others = (j for j in range(self.length) if j != at)
            near = (cos(0.7 * (j + 1) + 1.9 * row[j] * (symbol + 1) + 0.3 * at) for j in others)
            return 1.3 * sin(1 + 2.1 * at + 1.7 * symbol) + 0.9 * sum(near)

        weight = [exp(logit(symbol)) for symbol in range(self.symbols)]
        return [one / sum(weight) for one in weight]


class Spins(Bed):
    """The exact conditionals of a joint law."""

    length, symbols = 5, 2

    @cached_property
    def joint(self) -> dict[Row, float]:
        """The joint law."""

        def weight(row: Row) -> float:
            field = sum(cos(i + 2 * row[i]) for i in range(self.length))
            pairs = sum(row[i] * row[i + 1] for i in range(self.length - 1))
            return exp(0.8 * field + 1.1 * pairs - 0.7 * row[0] * row[-1])

        found = {row: weight(row) for row in self.answers}
        return {row: one / sum(found.values()) for row, one in found.items()}

    def law(self, row: Row, at: int) -> list[float]:
        def fits(answer: Row) -> bool:
            return all(row[i] in (2, answer[i]) or i == at for i in range(self.length))

        known = [(answer, p) for answer, p in self.joint.items() if fits(answer)]
        return [sum(p for y, p in known if y[at] == symbol) for symbol in range(2)]


@cache
def beds() -> dict[str, Bed]:
    """Return both beds, by their names in `unit/data/duel.json`."""
    return {"A (L=4, V=3)": Waves(), "B (L=5, V=2)": Spins()}


def fixed(score: str, at_once: int) -> Callable[[int], dict[str, Any]]:
    """Return the settings of `fixed` that commit `at_once` positions in a step, for an answer of some length."""
    return lambda length: {"scheduler": {"name": "fixed", "score": score, "steps": -(-length // at_once)}}


def named(name: str, **settings: Any) -> Callable[[int], dict[str, Any]]:
    """Return the settings of another scheduler."""
    return lambda length: {"scheduler": {"name": name, **settings}}


RULES = {
    "position k=1": fixed("position", 1),
    "peak k=1": fixed("confidence", 1),
    "peak k=2": fixed("confidence", 2),
    "margin k=1": fixed("margin", 1),
    "margin k=2": fixed("margin", 2),
    "entropy k=1": fixed("entropy", 1),
    "threshold 0.6": named("threshold", threshold=0.6),
    "localleap 0.7/0.5 r1": named("localleap", threshold=0.7, relaxed=0.5, radius=1),
    "entropy bound 0.5": named("entropy_bound", gamma=0.5),
    "all at once": fixed("position", 9),
}
JUDGING = ("peak", "threshold", "localleap")  # rules that look at the candidate


def settings(rule: str, length: int) -> dict[str, Any]:
    """Return the settings of a rule as the numbers name it, for example `margin k=2 {'T': 0.7}`."""
    name, _, more = rule.partition(" {")
    found = RULES[name](length) | {"judge": "best" if name.startswith(JUDGING) else "draw"}
    key, _, value = more.rstrip("}").replace("'", "").partition(": ")
    changed = {"": {}, "B": {"blocks": {"name": "fixed", "length": 2}}}
    return found | (changed[key] if key in changed else {"T": {"temperature": float(value)}, "k": {"top_k": 2}}[key])
