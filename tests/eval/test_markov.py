"""The chain's marginals are those of enumeration; exact orders reproduce it, parallel ones do not, and both show."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from dllm_sampler import Sampler, UserError, config
from dllm_sampler.eval import markov
from dllm_sampler.eval.testbeds.chain import MarkovChain
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import UNKNOWN

ROWS = ((0.7, 0.2, 0.1), (0.0, 0.4, 0.6), (0.5, 0.25, 0.25))


def test_marginals_are_those_of_enumeration() -> None:
    chain, rng = MarkovChain(ROWS, 5), Random(0)
    weights = {
        (start, *path): torch.tensor([ROWS[a][b] for a, b in zip((start, *path), path, strict=False)]).prod().item()
        for start in range(3)
        for path in product(range(3), repeat=5)
    }
    for _ in range(40):
        start = rng.randrange(3)
        path = rng.choice([path for path, weight in weights.items() if path[0] == start and weight > 0])
        seen = [symbol if rng.random() < 0.4 else UNKNOWN for symbol in path[1:]]
        fits = {
            other: weight
            for other, weight in weights.items()
            if other[0] == start and all(a in (UNKNOWN, b) for a, b in zip(seen, other[1:], strict=True))
        }
        found = chain.marginals(torch.tensor([seen]), torch.tensor([start]))[0]
        for place, symbol in product(range(5), range(3)):
            expected = sum(w for other, w in fits.items() if other[place + 1] == symbol) / sum(fits.values())
            assert float(found[place, symbol]) == pytest.approx(expected, abs=1e-6)


def test_stationary_and_rate() -> None:
    chain = MarkovChain(((0.9, 0.1), (0.3, 0.7)), 4)
    assert chain.stationary.tolist() == pytest.approx([0.75, 0.25])
    assert chain.entropy_rate == pytest.approx(0.75 * 0.325083 + 0.25 * 0.610864, abs=1e-5)


def decoded(chain: MarkovChain, rule: object, rows: int = 1500) -> tuple[torch.Tensor, torch.Tensor]:
    start, _ = chain.sample(rows, seed=99)
    sampler = Sampler(LawDenoiser(chain), scheduler=rule, blocks="full", stop="none", cache="none", temperature=1.0)
    return sampler.generate([[one] for one in start.tolist()], max_new_tokens=chain.length).tokens, start


@pytest.fixture(scope="module")
def chain() -> MarkovChain:
    return MarkovChain.drawn(6, 16)


@pytest.mark.parametrize("score", ["random", "position", "confidence"])
def test_one_per_step_is_exact(chain: MarkovChain, score: str) -> None:
    """In an order that does not look at what is drawn; by the sampled token's confidence it is not."""
    found = chain.distance(*decoded(chain, {"name": "fixed", "score": score}))
    if score == "confidence":
        assert found.gap < -4 * found.gap_floor, "likely tokens are preferred"
        assert found.kl > 4 * found.kl_floor
    else:
        assert abs(found.kl) < 4 * found.kl_floor
        assert found.tv < 1.3 * found.tv_floor
        assert abs(found.gap) < 4 * found.gap_floor


def test_more_per_step_is_further_off(chain: MarkovChain) -> None:
    errors = [chain.distance(*decoded(chain, {"name": "random_order", "steps": n})).kl for n in (1, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.2


def test_all_at_once_is_what_a_product_of_marginals_is(chain: MarkovChain) -> None:
    """Neighbours are then independent given the start, which can be counted without a sampler."""
    ids, start = decoded(chain, {"name": "fixed", "steps": 1}, 4000)
    at = (ids[:, 14] == 0).double().mean() * (ids[:, 15] == 1).double().mean()
    together = ((ids[:, 14] == 0) & (ids[:, 15] == 1)).double().mean()
    assert float(together) == pytest.approx(float(at), abs=4 * 0.5 / 4000**0.5)
    assert chain.distance(ids, start).gap > 0.5


def test_floors_shrink_with_the_number_of_samples(chain: MarkovChain) -> None:
    few, many = (chain.distance(*reversed(chain.sample(count, seed=5)), seed=7) for count in (200, 5000))
    assert many.tv_floor < few.tv_floor / 3
    assert abs(few.kl) < 4 * few.kl_floor


def test_refuses_what_is_no_chain() -> None:
    with pytest.raises(UserError, match="sum to 1"):
        MarkovChain(((0.5, 0.4), (0.5, 0.5)), 3)
    with pytest.raises(UserError, match="as many as its states"):
        MarkovChain(((0.5, 0.5),), 3)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--rows", "40", "--length", "6", "--states", "3"]
    assert markov.main(["--output", str(tmp_path / "out"), *size, "--only", "threshold", "random_order", "wino"]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert {point["scheduler"] for point in data["points"]} == {"threshold", "random_order"}
    assert [point["settings"]["steps"] for point in data["points"] if "steps" in point["settings"]] == [1, 2, 4]
    assert "wino" in data["refused"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "wino: not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--output", "x", "--only", "treshold"], "did you mean 'threshold'"),
        (["--output", "/nowhere/x"], "no folder /nowhere"),
        (["--output", "x", "--states", "1"], "at least 2"),
        ([], "--output"),
    ],
)
def test_command_refuses(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert markov.main(given) == 2
    assert said in capsys.readouterr().err


def test_knobs_are_fields() -> None:
    """Every scheduler is in the picture, under names that exist."""
    for name, settings in markov.plans(16):
        assert set(settings) <= set(config.entry("scheduler", name).settings)
    assert {name for name, _ in markov.plans(16)} == set(config.names("scheduler"))
