"""Schedulers that share a number of forwards among blocks say when these take more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from dllm_sampler import Infill, UserError, config
from dllm_sampler.check.settings import settings
from dllm_sampler.core.values import FREE
from dllm_sampler.errors import NoEffectWarning
from tests import toys
from tests.contract.cases import toy_for
from tests.refusals import refused
from tests.sampling import crossed

SHARED = ["fixed", "pc", "certainty", "klass", "budgeted", "remdm", "rcr", "ccd", "ccd_marginal", "learn2pd"]
SHARED = [*SHARED, "origin", "random_order"]
TOKENS = 13


def run(steps: int, prompts: Any, name: str = "fixed", kind: str = "llada", **options: Any) -> tuple[int, list[str]]:
    """The forwards of an answer and what was said."""
    given = {"filter": toys.FILTER} if name == "learn2pd" else {}
    sampler = toys.sampler(kind, scheduler={"name": name, "steps": steps, **given}, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = sampler.generate(prompts, max_new_tokens=TOKENS)
    return int(result.nfe.max()), [str(one.message) for one in said]


def test_all_that_share_steps_are_here() -> None:
    names = [one["name"] for one in settings("scheduler")]
    built = {name: config.build("scheduler", {"name": name, **_steps(name)}) for name in dict.fromkeys(names)}
    assert sorted(SHARED) == sorted(name for name, rule in built.items() if rule.total_steps == 9)


def _steps(name: str) -> dict[str, int]:
    try:
        config.build("scheduler", {"name": name, "steps": 9})
    except UserError:
        return {}
    return {"steps": 9}


@pytest.mark.parametrize("name", SHARED)
def test_fewer_steps_than_blocks(name: str) -> None:
    made, said = run(2, [[3, 4, 5]], name)
    assert made >= 3
    assert said == [
        f"steps=2 of scheduler={name} was exceeded: it made {made} forwards to commit all tokens. Each block takes at"
        " least one, so longer blocks may need fewer."
    ]


@pytest.mark.parametrize(
    ("name", "steps", "way"), crossed(list(SHARED), [2, 3, 5, 9], ["generate", "stream", "in_flight", "static"])
)
def test_the_last_number_is_the_most_that_was_made(name: str, steps: int, way: Any) -> None:
    given = {"filter": toys.FILTER} if name == "learn2pd" else {}
    sampler = toys.sampler("llada", scheduler={"name": name, "steps": steps, **given}, stop="none")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if way == "generate":
            made = int(sampler.generate([[3, 4, 5]], max_new_tokens=TOKENS).nfe.max())
        elif way == "stream":
            made = int([*sampler.stream([[3, 4, 5]], max_new_tokens=TOKENS)][-1].nfe.max())
        else:
            made = next(iter(sampler.generate_many([[3, 4, 5]], max_new_tokens=TOKENS, batching=way))).nfe
    numbers = [str(one.message) for one in said if "was exceeded" in str(one.message)]
    assert len(numbers) == (made > steps)
    assert made <= steps or f" {made} forwards" in numbers[0]


def test_one_block_takes_any_number() -> None:
    assert run(1, [[3, 4, 5]], blocks="full") == (1, [])


COUNTED = [
    ("llada", {"name": "fixed", "length": 4}),
    ("llada", {"name": "ascending", "count": 3}),
    ("causal", {"name": "fixed", "length": 4}),  # blocks are counted from the first token: the first is shorter
    ("causal", {"name": "fixed", "length": 4, "part": 2}),
    ("context", {"name": "fixed", "length": 4}),
]


@pytest.mark.parametrize(("counted", "steps"), crossed(COUNTED, [2, 3, 4, 5, 7]))
def test_the_number_is_that_of_the_forwards(counted: tuple[str, Any], steps: int) -> None:
    kind, blocks = counted
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    own = [3, 4] if kind == "causal" else [FREE, 3, 4, 5, FREE, 6, 7, 8, FREE]
    infill = [Infill([*own, *[FREE] * 7], [3, 4, 5])]
    for rows in [prompts] if kind == "context" else [prompts, infill]:
        made, said = run(steps, rows, kind=kind, blocks=blocks)
        assert [f"made {made} forwards" in one for one in said] == [True] * (made > steps)


def test_many_prompts_are_warned_of_once() -> None:
    sampler = toys.sampler(toy_for({"name": "fixed"}), scheduler={"name": "fixed", "steps": 2})
    with pytest.warns(NoEffectWarning, match="steps=2 of scheduler=fixed was exceeded") as said:
        list(sampler.generate_many(toys.PROMPTS, max_new_tokens=[14, 15, *[16] * (len(toys.PROMPTS) - 2)]))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("fixed", "alg_temp"),
        ("klass", "alg_temp"),
        ("certainty", "alg_temp"),
        ("pc", "alg_temp"),
        ("pc", "decay"),
        ("ccd", "expand"),
        ("eoser", "low"),
        ("eoser", "high"),
        ("svdd", "alpha"),
    ],
)
def test_a_factor_is_finite(name: str, field: str) -> None:
    with refused(f"option-range: scheduler.{field}"):
        config.build("scheduler", {"name": name, field: float("inf")})
