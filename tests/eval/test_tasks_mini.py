"""The task `mini`: its prompts, its marks, the kinds of its mistakes."""

from dllm_sampler.eval.tasks.base import Sample
from dllm_sampler.eval.tasks.mini import MANY
from dllm_sampler.models.mini_tasks import TASKS, held_out
from tests.eval.test_tasks import graded, task
from tests.sampling import each


@each("operation", TASKS)
def test_mini(operation: str) -> None:
    mini = task("mini", operation=operation, count=10)
    for sample in mini.samples():
        assert held_out(sample.prompt)
        assert (mini.dependency == "high") == (operation in MANY)
    found = graded(mini, Sample(0, TASKS[operation].syntax), TASKS[operation].answer)
    assert found == {key: float(key == "exact_match") for key in found}


def test_mistakes_of_mini() -> None:
    mini = task("mini", operation="replace randomly")
    sample = Sample(0, "replace randomly: Ada, Ben, Cal; Eve")
    assert graded(mini, sample, "Eve, Eve, Cal")["error_duplicate"] == 1
    assert graded(mini, sample, "Eve, Zoe, Cal")["error_unknown"] == 1
    both = graded(mini, sample, "Ada, Eve, Cal")
    assert (both["exact_match"], both["error_missing"], both["error_duplicate"]) == (1, 0, 0)
