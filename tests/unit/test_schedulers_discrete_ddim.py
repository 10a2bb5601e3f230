"""Discrete DDIM against laws that are enumerated: three tokens at three positions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, ModelSpec, Query, Sampler
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.values import Spent
from dllm_sampler.schedulers.discrete_ddim import DiscreteDDIM, Selection, conditional, route_law
from tests import toys
from tests.refusals import refused
from tests.sampling import each

K, L = 3, 3
STATES = list(product(range(K), repeat=L))
IDS = torch.tensor(STATES)  # [27, L]
EXACT = json.loads((Path(__file__).parent / "data" / "ddim.json").read_text())
DATA = torch.tensor(EXACT["p0"], dtype=torch.float64)  # [27]


def corruption(survival: float) -> Tensor:
    """`[x_0, x_t]` of one position."""
    return survival * torch.eye(K, dtype=torch.float64) + (1 - survival) / K


def marginal(survival: float) -> Tensor:
    """`[27]` the law of the noisy states."""
    q = corruption(survival)
    return torch.einsum("abc,ax,by,cz->xyz", DATA.view(K, K, K), q, q, q).flatten()


def posterior(survival: float) -> Tensor:
    """`[27, L, K]` what an exact model says of each clean token."""
    q = corruption(survival)
    joint = DATA * q[IDS[None], IDS[:, None]].prod(-1)  # [x_t, x_0]
    joint = joint / joint.sum(1, keepdim=True)
    return torch.stack([torch.stack([joint[:, IDS[:, i] == a].sum(1) for a in range(K)], 1) for i in range(L)], 1)


def joint(laws: Tensor) -> Tensor:
    """`[27, 27]` transitions from `[27, L, K]` a law of each position."""
    return torch.einsum("sa,sb,sc->sabc", *laws.unbind(1)).flatten(1)


def predicted(number: int, steps: int, temperature: float = 1.0) -> Tensor:
    """`[27, 27]` a predictor step."""
    clean = posterior(number / steps)
    if not temperature:
        clean = (clean == clean.amax(-1, keepdim=True)).double()
    law, eye = torch.zeros_like(clean), torch.eye(K, dtype=torch.float64)
    for token in range(K):
        routes = route_law(torch.full_like(IDS, token) == IDS, torch.full((27,), number), steps, K)  # [27, L, 3]
        after = routes[..., :1] * eye[token] + routes[..., 1:2] * eye[IDS] + routes[..., 2:] / K
        law += clean[..., token : token + 1] * after
    return joint(law)


def corrected(scheduler: DiscreteDDIM, survival: float) -> Tensor:
    """`[27, 27]` a sweep over one or two positions."""
    logits, alpha = posterior(survival).log(), torch.full((27,), survival, dtype=torch.float64)
    law, doubt = conditional(logits, IDS, alpha).exp(), scheduler.doubt(logits, IDS, alpha)
    pick, moves = (doubt / scheduler.corrector_selection_tau).softmax(1), torch.zeros(27, 27, dtype=torch.float64)
    stays = torch.eye(K, dtype=torch.float64)[IDS]
    for one, two in product(range(L), repeat=2):
        chosen = torch.zeros(L, dtype=torch.bool)
        chosen[[one, two]] = True
        if scheduler.corrector_k == 1:
            weight = pick[:, one] * (one == two)
        else:  # without replacement
            weight = pick[:, one] * pick[:, two] / (1 - pick[:, one]) * (one != two)
        moves += weight[:, None] * joint(torch.where(chosen[:, None], law, stays))
    return moves


def final(scheduler: DiscreteDDIM, temperature: float = 1.0) -> Tensor:
    """`[27]` the law of an answer."""
    law = torch.full((27,), 1 / 27, dtype=torch.float64)
    for number in range(scheduler.predictor_steps):
        law = law @ predicted(number, scheduler.predictor_steps, temperature)
        for _ in range(scheduler.corrector_steps if number < scheduler.corrected_steps else 0):
            law = law @ corrected(scheduler, (number + 1) / scheduler.predictor_steps)
    return law


def divergence(law: Tensor) -> float:
    return float(torch.special.xlogy(law, law / DATA).sum())


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_a_step_is_bayes(vocab: int) -> None:
    """q(x_s | x_t, x_0) of uniform corruption, for every step of five."""
    eye, uniform = torch.eye(vocab, dtype=torch.float64), torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64)
    for number in range(5):
        before, after = number / 5, (number + 1) / 5
        step = before / after * eye + (1 - before / after) * uniform  # [x_s, x_t]
        clean = after * eye + (1 - after) * uniform  # [x_0, x_s]
        wanted = clean[None] * step.T[:, None]  # [x_t, x_0, x_s]
        same = torch.eye(vocab, dtype=torch.bool)
        routes = route_law(same, torch.full((vocab,), number), 5, vocab)
        found = routes[..., :1] * eye + routes[..., 1:2] * eye[:, None] + routes[..., 2:] / vocab
        torch.testing.assert_close(found, wanted / wanted.sum(-1, keepdim=True))


@pytest.mark.parametrize("steps", map(int, EXACT["predictor"]))
def test_the_error_of_independent_positions(steps: int) -> None:
    assert divergence(final(DiscreteDDIM(steps))) == pytest.approx(EXACT["predictor"][str(steps)], rel=1e-9)


def test_the_best_tokens_have_another_law() -> None:
    for steps, wanted in EXACT["greedy"].items():
        assert divergence(final(DiscreteDDIM(int(steps)), 0.0)) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", EXACT["corrected"])
def test_the_law_with_a_corrector(name: str) -> None:
    _, budget, sweeps, selection = name.replace("c=", "").split()
    scheduler = DiscreteDDIM(int(budget), int(sweeps), corrector_selection=selection)  # pyright: ignore
    assert scheduler.predictor_steps == EXACT["corrected"][name]["grid"]
    assert divergence(final(scheduler)) == pytest.approx(EXACT["corrected"][name]["kl"], rel=1e-9)


@pytest.mark.parametrize("name", EXACT["invariance"])
def test_only_one_random_position_leaves_the_law(name: str) -> None:
    selection, _, k = name.replace("=", " ").split()
    scheduler = DiscreteDDIM(corrector_selection=selection, corrector_k=int(k))  # pyright: ignore
    before = marginal(0.5)
    moved = float((before @ corrected(scheduler, 0.5) - before).abs().sum() / 2)
    assert moved == pytest.approx(EXACT["invariance"][name], abs=1e-12)
    assert (moved < 1e-12) == (name == "random k=1")


@dataclass
class Toy:
    """The exact model, for rows that are in one step. Or one that says the same whatever it sees."""

    rule: DiscreteDDIM
    exact: bool = True
    spec: ModelSpec = field(
        default_factory=lambda: ModelSpec(
            K, None, K, 0, 99, 0, 1, 1, torch.float64, torch.device("cpu"), cacheable=False
        )
    )

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        number, sweep = (int(one[0]) for one in self.rule.clock(canvas))
        table = posterior((number + (sweep > 0)) / self.rule.predictor_steps if self.exact else 0.0).log()
        place = (query.ids[:, 0] * torch.tensor([9, 3, 1])).sum(1)
        one = torch.ones_like(canvas.step)
        return plan.head_rows.pick(table[place][:, None]), Spent(one, one)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


@each("selection", ["random", "lowest_log_margin"])
def test_answers_have_the_law(selection: Selection) -> None:
    rows = 4000
    scheduler = DiscreteDDIM(16, 1, corrector_selection=selection, confidence_threshold=None)
    sampler = Sampler(Toy(scheduler), scheduler=scheduler, blocks="full", stop="none", temperature=1.0)
    result = sampler.generate([[0]] * rows, max_new_tokens=L, seed=list(range(rows)))
    assert result.nfe.tolist() == [16] * rows
    found = torch.bincount((result.tokens * torch.tensor([9, 3, 1])).sum(1), minlength=27) / rows
    assert float((found - final(scheduler)).abs().sum() / 2) < 0.05  # 0.03 by chance
    assert (float((found - DATA).abs().sum() / 2) > 0.1) == (selection == "lowest_log_margin")


@each(("settings", "forwards"), [({}, 2), ({"stability_threshold": 3}, 4), ({"corrector_steps": 2}, 6)])
def test_a_block_ends_once_it_is_stable(settings: dict[str, Any], forwards: int) -> None:
    """After the sweeps of the step that finds it stable, as published."""
    scheduler = DiscreteDDIM(12, confidence_threshold=99.0, **settings)
    result = Sampler(Toy(scheduler, False), scheduler=scheduler, blocks="full", stop="none").generate(
        [[0]], max_new_tokens=L
    )
    assert int(result.nfe) == forwards
    assert result.tokens[0].tolist() == posterior(0.0)[0].argmax(-1).tolist()


def test_what_is_refused() -> None:
    with refused("plugins-incompatible: scheduler=discrete_ddim, scheduler=origin"):
        toys.sampler(scheduler="discrete_ddim")
    for field_, value, code in (
        ("corrector_selection", "lowest", "choice-unknown"),
        ("corrector_selection_tau", 0.0, "option-range"),
        ("max_denoising_steps", 0, "option-range"),
        ("corrector_k", 0, "option-range"),
        ("stability_threshold", 0, "option-range"),
    ):
        with refused(f"{code}: scheduler.{field_}"):
            DiscreteDDIM(**{field_: value})  # pyright: ignore
