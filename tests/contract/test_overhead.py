"""A decision takes few operations, what a GPU that waits for launches feels: a count that is the same everywhere."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import config
from dllm_sampler.schedulers.threshold import Threshold
from tests.contract.decisions import Scene, decision, operations, scheduler

# Above twice threshold's count, each with the count that it has; whoever lowers one lowers it here.
DEARER = {
    "budgeted": 38,  # a budget that goes from step to step, over a sort
    "ccd": 65,  # a line of positions, and the one before it
    "ccd_marginal": 81,  # distributions of the last steps
    "certainty": 47,  # the fixed schedule and every position's neighbourhood, in answers of their own lengths
    "credit": 58,  # remembered tokens of every position
    "daedal": 77,  # a sum over the answer, the least sure mask, and which rows have begun
    "entropy_renoise": 66,  # a sort of entropies, and what it takes back
    "eoser": 39,  # the scheduler inside, and a factor
    "freedave": 341,  # the scheduler inside, once for each of three drafts and the step after them
    "klass": 80,  # distributions of the last step, and the fixed schedule
    "learn2pd": 54,  # a network
    "lopa": 101,  # the scheduler inside, once for the winner, and the score of every candidate
    "pc": 37,  # the fixed schedule, weighted by place and by frequency
    "random_order": 72,  # the order of every column, ahead of time
    "remdm": 47,  # two choices, the second of which looks at the first
    "remix": 71,  # distributions of the last step, and the likeliest tokens of this one
    "rho_eos": 62,  # the same sum
    "slowfast": 77,  # two phases
    "ssd": 341,  # as freedave
    "wino": 35,  # a choice of tokens and one of those to take back, each among the positions open to it
}


# Operations of a step besides the model and the readout, by scheduler, cache, stop; whoever lowers one lowers it here.
STEPS = {
    ("threshold", "none", "prefix"): 113,
    ("threshold", "dual", "prefix"): 124,
    ("fixed", "dual", "prefix"): 138,
    ("fixed", "dual", "none"): 128,
    ("klass", "dual", "prefix"): 184,
}


LIMIT = 2  # what a decision may take, as a multiple of threshold's


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("step_operations")


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene(batch=8, block=32, vocab=640)  # the count does not depend on them


# A second model, a reward, a model of a kind, or attention.
ELSEWHERE = ("apd", "svdd", "s2d2", "s2d2_editing", "linear_spec", "discrete_ddim", "dawn")
METHODS = [name for name in config.names("scheduler") if name not in ELSEWHERE]


@pytest.mark.parametrize("name", METHODS)
def test_a_decision_takes_few_operations(scene: Scene, name: str) -> None:
    found, allowed = decision(scene, scheduler(scene, name)), LIMIT * decision(scene, Threshold())
    assert found <= DEARER.get(name, allowed)
    assert DEARER.get(name, allowed + 1) > allowed, "it is within the rule: take it off the list"


@pytest.mark.parametrize("plugins", STEPS, ids="-".join)
def test_a_step_takes_few_operations(plugins: tuple[str, str, str], step: Any) -> None:
    found = step.operations(*plugins)
    assert step.outside(found) - found["readout"] == STEPS[plugins]


def test_the_page_has_the_counts(step: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert len(page.split()) <= 1500, "a page that is read; what was tried is in docs/experiments.md"
    for (rule, cache, stop), count in STEPS.items():
        assert (cache, stop) != ("dual", "prefix") or re.search(rf"\b{count}( operations)? \({rule}\)", page)
    found = step.operations("threshold", "dual", "prefix")
    every, readout = step.outside(found), found["readout"]
    assert f"they are {every} in torch, {readout} of them the readout" in page
    assert f"the other {every - readout} are" in page


def test_the_table_of_operations(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--schedulers", "fixed", "--caches", "dual", "--stops", "none"]) == 0
    assert "observe" in capsys.readouterr().out


def test_views_are_not_counted() -> None:
    x = torch.ones(2, 3)
    assert operations(lambda: x[:, None].expand(2, 4, 3).transpose(0, 1)) == 0
    assert operations(lambda: (x + 1).sum()) == 2
