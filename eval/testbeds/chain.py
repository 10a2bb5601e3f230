"""A Markov chain as a law: its exact posterior marginals between known tokens, and the distance of samples from it.

The question is that of arXiv 2602.19619: how does a sampler change the transitions, given a model without error?
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from random import Random

import torch
from torch import Tensor

from dllm_sampler.errors import UserError
from dllm_sampler.eval.testbeds.laws import UNKNOWN, normalised


@dataclass(frozen=True)
class Distance:
    """The distance of a set of sequences from the chain. A floor is the value of a measure for as many exact samples.

    transition_kl, transition_kl_floor: nats per transition, sum over states of their share times
        KL(counted || true). The expectation over exact samples, about (free parameters) / (2 * transitions), is
        subtracted, so that exact samples are near 0. The floor is the root mean square over exact samples.
    transition_tv, transition_tv_floor: sum over states of their share times the total variation. The floor is the mean
        over exact samples.
    likelihood_gap: nats per token by which the sequences are less likely under the chain than exact samples. It is
        negative if they are more likely, which is as wrong.
    likelihood_gap_floor: the root mean square of the gap over exact samples.
    impossible_transitions: share of transitions that the chain never makes.
    """

    transition_kl: float
    transition_kl_floor: float
    transition_tv: float
    transition_tv_floor: float
    likelihood_gap: float
    likelihood_gap_floor: float
    impossible_transitions: float


@dataclass(frozen=True)
class MarkovChain:
    """The law of the next `length` tokens after the last one of the prompt.

    rows: transition probabilities, one row for each state. The chain has to be irreducible and aperiodic, which is not
        checked
    length: the number of tokens N
    """

    rows: tuple[tuple[float, ...], ...]
    length: int

    def __post_init__(self) -> None:
        table = torch.tensor(self.rows, dtype=torch.float64)
        if table.dim() != 2 or table.shape[0] != table.shape[1]:
            shape = tuple(table.shape)
            raise UserError("option-range", f"MarkovChain.rows has shape {shape}. Give one row and column per state.")
        for number, row in enumerate(self.rows):
            if not (min(row) >= 0 and abs(sum(row) - 1) <= 1e-9):
                what = f"MarkovChain.rows[{number}] has minimum {min(row):g} and sum {sum(row):.10g}"
                raise UserError("option-range", f"{what}. Give probabilities that sum to 1.")

    @staticmethod
    def drawn(states: int, length: int, concentration: float = 0.3, seed: int = 0) -> MarkovChain:
        """Draw rows from a Dirichlet law, the same on every machine. A small concentration makes them peaked."""
        rng = Random(f"chain/{states}/{concentration}/{seed}")
        # No entry is below 0.001 / states, so that the chain is irreducible and no log-probability dominates a mean.
        weights = [[rng.gammavariate(concentration, 1) for _ in range(states)] for _ in range(states)]
        for row in weights:
            if not sum(row):  # too peaked for floats: give all probability to one state
                row[rng.randrange(states)] = 1.0
        mixed = [[0.999 * one / sum(row) + 0.001 / states for one in row] for row in weights]
        return MarkovChain(tuple(map(tuple, mixed)), length)

    @property
    def symbols(self) -> int:
        """The number of states S."""
        return len(self.rows)

    @cached_property
    def matrix(self) -> Tensor:
        """The transition probabilities `[S, S] float64`."""
        return torch.tensor(self.rows, dtype=torch.float64)

    @cached_property
    def stationary(self) -> Tensor:
        """The stationary law `[S] float64`: the probabilities of a state that is far from all known ones."""
        system = torch.cat([self.matrix.T - torch.eye(self.symbols), torch.ones(1, self.symbols)]).double()
        target = torch.zeros(self.symbols + 1, 1, dtype=torch.float64)
        target[-1] = 1
        return torch.linalg.lstsq(system, target).solution[:, 0].clamp(min=0)

    @cached_property
    def entropy_rate(self) -> float:
        """The entropy in nats per token, from a stationary start."""
        return float((self.stationary * torch.special.entr(self.matrix).sum(1)).sum())

    @cached_property
    def _powers(self) -> Tensor:
        """The transition probabilities over 0 to N steps, `[N + 1, S, S] float64`."""
        powers = [torch.eye(self.symbols, dtype=torch.float64)]
        for _ in range(self.length):
            powers.append(powers[-1] @ self.matrix)
        return torch.stack(powers)

    def marginals(self, known: Tensor, before: Tensor) -> Tensor:
        """Return the law of each position, `[R, N, S]`, given the nearest known tokens (see `Law.marginals`)."""
        powers = self._powers.to(known.device)
        full = torch.cat([before[:, None], known], 1)  # [R, N + 1]
        place = torch.arange(full.shape[1], device=known.device)
        there = full != UNKNOWN
        there[:, 0] = True
        nearest = torch.where(there, place, 0).cummax(1).values  # of those at or left of each place
        after = torch.where(there, place, full.shape[1]).flip(1).cummin(1).values.flip(1)  # N + 1: none
        left = full.gather(1, nearest)
        right = torch.cat([full, full.new_zeros(full.shape[0], 1)], 1).gather(1, after)
        forward = powers[place - nearest, left]  # [R, N + 1, S] from the left one to here
        ahead = (after - place).clamp(max=self.length)
        backward = powers.transpose(1, 2)[ahead, right]  # [R, N + 1, S] from here to the right one
        backward = torch.where((after <= self.length)[..., None], backward, 1.0)
        return normalised(forward * backward)[:, 1:]

    def sample(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw exact sequences: stationary starts `[count]`, and the tokens after them, `[count, N]`."""
        generator = torch.Generator().manual_seed(seed)
        start = self.stationary.multinomial(count, replacement=True, generator=generator)
        steps = [start]
        for _ in range(self.length):
            steps.append(self.matrix[steps[-1]].multinomial(1, generator=generator)[:, 0])
        return start, torch.stack(steps[1:], 1)

    def log_likelihood(self, ids: Tensor, before: Tensor) -> Tensor:
        """Return the log-likelihood `[R]` in nats of `ids [R, N]` after `before [R]`."""
        full = torch.cat([before[:, None], ids], 1)
        return self.matrix[full[:, :-1], full[:, 1:]].log().sum(1)

    def distance(self, ids: Tensor, before: Tensor, *, repeats: int = 8, seed: int = 0) -> Distance:
        """Measure sequences `ids [R, N]` after `before [R]` against the chain. `repeats` exact sets give the floors."""
        exact = [self.sample(len(ids), seed + turn) for turn in range(repeats)]
        kl, tv, impossible = self._transitions(ids, before)
        floors = [self._transitions(drawn, start)[:2] for start, drawn in exact]
        gaps = [self._gap(drawn, start) for start, drawn in exact]
        return Distance(
            transition_kl=kl,
            transition_kl_floor=sqrt(sum(one**2 for one, _ in floors) / repeats),
            transition_tv=tv,
            transition_tv_floor=sum(one for _, one in floors) / repeats,
            likelihood_gap=self._gap(ids, before),
            likelihood_gap_floor=sqrt(sum(one**2 for one in gaps) / repeats),
            impossible_transitions=impossible,
        )

    def _gap(self, ids: Tensor, before: Tensor) -> float:
        """Return the expected log-likelihood per token after the same starts, minus that of the sequences."""
        expected, law = 0.0, torch.nn.functional.one_hot(before, self.symbols).double().mean(0)
        for _ in range(self.length):
            expected += float(law @ torch.special.entr(self.matrix).sum(1))
            law = law @ self.matrix
        return (-float(self.log_likelihood(ids, before).mean()) - expected) / self.length

    def _transitions(self, ids: Tensor, before: Tensor) -> tuple[float, float, float]:
        """Return corrected KL, TV, and the share of impossible transitions."""
        full = torch.cat([before[:, None], ids], 1)
        pairs = full[:, :-1] * self.symbols + full[:, 1:]
        counts = torch.bincount(pairs.flatten(), minlength=self.symbols**2).double().view_as(self.matrix)
        total, often = counts.sum(), counts.sum(1, keepdim=True)
        found = counts / often.clamp(min=1)
        share = often[:, 0] / total
        never = self.matrix == 0
        ratio = torch.where((found > 0) & ~never, found / self.matrix.clamp(min=1e-300), 1.0)
        kl = float((share * (found * ratio.log()).sum(1)).sum())
        free = int(((~never).sum(1) - 1)[often[:, 0] > 0].sum())
        tv = float((share * (found - self.matrix).abs().sum(1) / 2).sum())
        return kl - free / (2 * float(total)), tv, float(counts[never].sum() / total)
