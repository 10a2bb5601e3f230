"""Test beds as tasks. The model is part of the task and exact, so all errors are the sampler's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import exp
from random import Random
from typing import Any, Literal

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_positive
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.errors import unknown
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.drawn import Drawn, Prompt
from dllm_sampler.eval.testbeds.chain import MarkovChain
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import LAWS, Listed, Shuffle


@dataclass
class Ideal(Drawn):
    """An operation on a list, one token per item, by a model that knows every marginal exactly.

    Sampled at temperature 1 (`guide=temperature`) with `blocks=full`, the score has a closed form for many schedulers
    (`tests/tables/closed_form.py`).

    Args:
        operation: a key of `LAWS` in `eval/testbeds/laws.py`, for example shuffle.
        items: number of items, or the side of a latin square.
    """

    operation: str = "shuffle"
    items: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operation not in LAWS:
            raise unknown("task.operation", self.operation, LAWS)
        most = {"latin_square": 4, "even_parity": 14}.get(self.operation, 1000)
        check_count("task.items", self.items, 2, most=most)

    @cached_property
    def law(self) -> Listed | Shuffle:
        """The law of the outcomes."""
        return LAWS[self.operation](self.items)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name of the task, for example ideal_shuffle."""
        return f"ideal_{self.operation}"

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of tokens of an outcome."""
        return self.law.length

    @property
    def dependency(self) -> Literal["low", "high"]:
        """`high` if the conditional total correlation C(Y|X) is above 0, else `low`."""
        return "high" if self.law.c_bits > 1e-9 else "low"

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Return the same prompt for every sample. Answers differ by the seeds of the draws."""
        return [0], {}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score`: 1 if it is an outcome of the law."""
        ids = list(answer.ids)[: self.law.length]
        whole = len(ids) == self.law.length
        return {"score": float(whole and bool(self.law.valid(torch.tensor([ids]))[0]))}

    @override
    def denoiser(self) -> Denoiser:
        return LawDenoiser(self.law)


@dataclass
class Markov(Drawn):
    """Continuations of a Markov chain by a model that knows every posterior marginal exactly (arXiv 2602.19619).

    The errors in transitions are measured over all answers (`together`). `task=markov` implies `suite=markov`: every
    scheduler at several settings, at temperature 1 in one block without cache.

    Args:
        states: number of states.
        length: tokens after the first state.
        concentration: parameter of the Dirichlet law of the rows. A small one makes them peaked.
        chain: seed of the chain itself.
    """

    name = "markov"
    many = True

    states: int = 8
    length: int = 32
    concentration: float = 0.3
    chain: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("task.states", self.states, 2)
        check_count("task.length", self.length)
        check_positive("task.concentration", self.concentration)

    @cached_property
    def law(self) -> MarkovChain:
        """The chain."""
        return MarkovChain.drawn(self.states, self.length, self.concentration, self.chain)

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of tokens of the law."""
        return self.length

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw the prompt, which is a state of the stationary law, and its facts."""
        # Rounded: the last digits of a sum differ from machine to machine.
        shares = [round(share, 9) for share in self.law.stationary.tolist()]
        start = rng.choices(range(self.states), shares)[0]
        return [start], {"start": start, "entropy_rate": round(self.law.entropy_rate, 9)}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `log_likelihood` (nats per token under the chain) and `score`.

        The score is 1 for a typical likelihood, and falls by a factor of e for each nat per token above or below it.
        Exact answers vary, too, so their mean score is below 1.
        """
        ids = list(answer.ids)[: self.length]
        if len(ids) < self.length or any(one >= self.states for one in ids):
            return {"score": 0.0, "error_truncated": 1.0}
        start = torch.tensor([int(sample.facts["start"])])
        found = float(self.law.log_likelihood(torch.tensor([ids]), start)[0]) / self.length
        return {"score": exp(-abs(found + self.law.entropy_rate)), "log_likelihood": found, "error_truncated": 0.0}

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Measure the distance of the answers from the chain (`chain.Distance`). Returns {} if one is cut."""
        rows = [(list(a.ids)[: self.length], int(s.facts["start"])) for s, a in zip(samples, answers, strict=True)]
        if any(len(ids) < self.length or max(ids) >= self.states for ids, _ in rows):
            return {}
        ids, starts = zip(*rows, strict=True)
        return asdict(self.law.distance(torch.tensor(ids), torch.tensor(starts)))

    @override
    def denoiser(self) -> Denoiser:
        return LawDenoiser(self.law)
