"""The task `mini`: its prompts, its marks, the kinds of its mistakes."""

import pytest

from dllm_sampler.eval.tasks.base import Sample
from dllm_sampler.eval.tasks.mini import MANY, c_bits
from dllm_sampler.eval.testbeds.laws import LAWS
from dllm_sampler.models.mini_tasks import TASKS, held_out
from tests.eval.test_tasks import graded, task
from tests.sampling import each


@each("operation", TASKS)
def test_mini(operation: str) -> None:
    mini = task("mini", operation=operation, count=10)
    for sample in mini.samples():
        assert held_out(sample.prompt)
        assert (mini.dependency == "high") == (operation in MANY)
        assert sample.facts["c_bits"] == 0 or operation in MANY
    found = graded(mini, Sample(0, TASKS[operation].syntax), TASKS[operation].answer)
    assert found == {key: float(key == "exact_match") for key in found}


def test_bits_of_mini_are_those_of_the_laws() -> None:
    people = "Ada, Ben, Cal, Dan"
    for operation, law in (("insert randomly", "insert_random"), ("remove randomly", "remove_random"),
                           ("replace randomly", "replace_random"), ("shuffle", "shuffle")):  # fmt: skip
        prompt = (
            f"{operation}: {people}; Eve" if law in ("insert_random", "replace_random") else f"{operation}: {people}"
        )
        assert c_bits(operation, prompt) == pytest.approx(LAWS[law](4).c_bits)
    assert c_bits("latin", "latin: ____, ____, ____, ____") == pytest.approx(LAWS["latin_square"](4).c_bits)
    assert c_bits("shuffle", "shuffle: Ada, Ada") == pytest.approx(0)


def test_mistakes_of_mini() -> None:
    mini = task("mini", operation="replace randomly")
    sample = Sample(0, "replace randomly: Ada, Ben, Cal; Eve")
    assert graded(mini, sample, "Eve, Eve, Cal")["error_duplicate"] == 1
    assert graded(mini, sample, "Eve, Zoe, Cal")["error_unknown"] == 1
    both = graded(mini, sample, "Ada, Eve, Cal")
    assert (both["exact_match"], both["error_missing"], both["error_duplicate"]) == (1, 0, 0)
