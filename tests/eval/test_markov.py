"""The chain's marginals are those of enumeration; exact orders reproduce it, parallel ones do not, and both show."""

from __future__ import annotations

from itertools import product
from math import exp
from pathlib import Path
from random import Random

import pytest
import torch

from dllm_sampler import Sampler, config
from dllm_sampler.eval import command
from dllm_sampler.eval.jobs import jobs, lines, values
from dllm_sampler.eval.report import markov
from dllm_sampler.eval.report.data import load
from dllm_sampler.eval.report.page import page
from dllm_sampler.eval.report.pictures import pictures
from dllm_sampler.eval.tasks.base import Answer
from dllm_sampler.eval.tasks.beds import Markov
from dllm_sampler.eval.testbeds.chain import MarkovChain
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import UNKNOWN
from tests.refusals import refused
from tests.sampling import few

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


@few("score", ["position", "random", "confidence"])
def test_one_per_step_is_exact(chain: MarkovChain, score: str) -> None:
    """In an order that does not look at what is drawn; by the sampled token's confidence it is not."""
    found = chain.distance(*decoded(chain, {"name": "fixed", "score": score}))
    if score == "confidence":
        assert found.likelihood_gap < -4 * found.likelihood_gap_floor, "likely tokens are preferred"
        assert found.transition_kl > 4 * found.transition_kl_floor
    else:
        assert abs(found.transition_kl) < 4 * found.transition_kl_floor
        assert found.transition_tv < 1.3 * found.transition_tv_floor
        assert abs(found.likelihood_gap) < 4 * found.likelihood_gap_floor


@pytest.mark.slow
def test_more_per_step_is_further_off(chain: MarkovChain) -> None:
    errors = [
        chain.distance(*decoded(chain, {"name": "random_order", "steps": n})).transition_kl for n in (1, 4, 8, 16)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.2


@pytest.mark.slow
def test_all_at_once_is_what_a_product_of_marginals_is(chain: MarkovChain) -> None:
    """Neighbours are then independent given the start, which can be counted without a sampler."""
    ids, start = decoded(chain, {"name": "fixed", "steps": 1}, 4000)
    at = (ids[:, 14] == 0).double().mean() * (ids[:, 15] == 1).double().mean()
    together = ((ids[:, 14] == 0) & (ids[:, 15] == 1)).double().mean()
    assert float(together) == pytest.approx(float(at), abs=4 * 0.5 / 4000**0.5)
    assert chain.distance(ids, start).likelihood_gap > 0.5


@pytest.mark.slow
def test_floors_shrink_with_the_number_of_samples(chain: MarkovChain) -> None:
    few, many = (chain.distance(*reversed(chain.sample(count, seed=5)), seed=7) for count in (200, 5000))
    assert many.transition_tv_floor < few.transition_tv_floor / 3
    assert abs(few.transition_kl) < 4 * few.transition_kl_floor


def test_a_very_peaked_chain_can_be_drawn() -> None:
    rows = MarkovChain.drawn(8, 4, concentration=1e-4).rows
    assert all(sum(row) == pytest.approx(1) and max(row) > 0.99 for row in rows)


def test_refuses_what_is_no_chain() -> None:
    with refused("option-range: MarkovChain.rows[0], 0.9"):
        MarkovChain(((0.5, 0.4), (0.5, 0.5)), 3)
    with refused("option-range: MarkovChain.rows, (1, 2)"):
        MarkovChain(((0.5, 0.5),), 3)


SIZE = ["task=markov", "task.count=40", "task.length=6", "task.states=3", "device=cpu"]


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Error against forwards is drawn, and stands in the table, the directories and the report."""
    words = [*SIZE, f"output={tmp_path}", "scheduler=fixed,random_order", "scheduler.steps=1,6"]
    monkeypatch.setenv("COLUMNS", "150")
    assert command.main(words) == 0
    assert "transition kl" in capsys.readouterr().out
    assert (tmp_path / "markov.png").read_bytes().startswith(b"\x89PNG")
    found = load([tmp_path])
    assert set(markov.curves(found, "markov")) == {"fixed", "random_order"} and len(found.methods) == 4
    for scheduler in ("fixed", "random_order"):
        fast, slow = (found.figures["all tasks"][f"{scheduler} steps={steps}"]["transition_kl"] for steps in (1, 6))
        assert fast is not None and slow is not None and fast > slow
    assert "markov" in pictures(found)
    assert '"name":"transition_kl"' in page(found, "A chain", 0)
    assert all(run.about["config"]["temperature"] == 1 for method in found.methods for run in method.runs.values())


@pytest.mark.slow
def test_two_chains_are_two_pictures(tmp_path: Path) -> None:
    words = [*SIZE, f"output={tmp_path}", "scheduler=random_order", "task.chain=0,1"]
    assert command.main(words) == 0
    found = load([tmp_path])
    assert set(markov.drawn(found)) == {"markov", "markov1"}
    (method,) = found.methods
    each = [run.together["transition_tv"] or 0.0 for run in method.runs.values()]
    assert found.figures["all tasks"][method.label]["transition_tv"] == pytest.approx(sum(each) / 2)


def test_too_likely_is_as_wrong_as_too_unlikely() -> None:
    task = Markov(count=1, length=4, states=3, concentration=1.0)
    (sample,) = task.samples()
    graded = [task.grade(sample, Answer("", list(ids))) for ids in product(range(3), repeat=4)]
    assert any(one["log_likelihood"] > -task.law.entropy_rate for one in graded)
    for one in graded:
        assert one["score"] == pytest.approx(exp(-abs(one["log_likelihood"] + task.law.entropy_rate)))


def test_the_suite_has_every_scheduler_under_names_that_exist() -> None:
    found = set()
    for line in lines(["task=markov"]):
        given = {word.partition("=")[0]: values(word) for word in line}
        names = [word.partition("=")[2] for word in given["scheduler"]]
        found |= set(names)
        for key in given:
            if key.startswith("scheduler."):
                assert all(key.partition(".")[2] in config.entry("scheduler", name).settings for name in names)
    assert found == set(config.names("scheduler"))


def test_a_task_brings_the_suite_of_its_name() -> None:
    (only,) = jobs(["task=markov", "scheduler=wino"])
    assert (only.options.temperature, only.plugins["blocks"]["name"]) == (1, "full")
    assert only.plugins["stop"]["name"] == "none" == only.plugins["cache"]["name"]
    (other,) = jobs(["task=markov", "scheduler=wino", "temperature=null", "blocks=fixed"])
    assert (other.options.temperature, other.plugins["blocks"]["name"]) == (None, "fixed")
