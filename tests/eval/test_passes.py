"""Measures of several samples for each prompt, against brute force."""

import csv
import json
import re
import shlex
import warnings
from itertools import combinations, permutations
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from dllm_sampler.errors import FallbackWarning
from dllm_sampler.eval import passes, statistics
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.report.command import main as write_report
from dllm_sampler.eval.report.data import Run, compare
from dllm_sampler.eval.report.page import data
from dllm_sampler.eval.report.rows import rows
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.eval.tasks.repeated import Repeated
from tests.eval.made import record, run
from tests.refusals import refused


@pytest.mark.parametrize(("samples", "correct"), [(n, c) for n in (1, 2, 5, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_all_sets_of_k(samples: int, correct: int) -> None:
    for k in range(1, samples + 1):
        sets = list(combinations(range(samples), k))
        share = fmean(any(one < correct for one in chosen) for chosen in sets)
        assert passes.pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-12)


def by_orders(costs: list[int], correct: list[bool], budget: int) -> float:
    """Draw in every order until the next sample would exceed the budget."""
    solved = []
    for order in permutations(range(len(costs))):
        spent, found = 0, False
        for one in order:
            spent += costs[one]
            if spent > budget:
                break
            found = found or correct[one]
        solved.append(found)
    return fmean(solved)


@pytest.mark.parametrize("seed", range(12))
def test_pass_at_nfe_is_the_share_of_all_orders(seed: int) -> None:
    rng = Random(seed)
    size = rng.randint(1, 6)
    unit, correct = rng.choice((1, 3)), [rng.random() < 0.4 for _ in range(size)]
    costs = [unit * rng.randint(0 if seed > 9 else 1, 7) for _ in range(size)]
    budgets = list(range(sum(costs) + 2))
    found = passes.pass_at_nfe(costs, correct, budgets)
    assert found == pytest.approx([by_orders(costs, correct, budget) for budget in budgets], abs=1e-11)
    assert found == sorted(found), "more forwards solve no less"
    assert not any(found[: min(costs)]), "no sample costs so little"
    assert found[sum(costs)] == any(correct)


def test_pass_at_nfe_of_equal_costs_is_pass_at_k() -> None:
    for correct, cost in ((0, 5), (3, 5), (40, 5), (64, 1), (1, 256)):
        budgets = range(0, 64 * cost + 1, max(1, cost // 2))
        found = passes.pass_at_nfe([cost] * 64, [one < correct for one in range(64)], budgets)
        by_k = [passes.pass_at_k(64, correct, budget // cost) for budget in budgets]
        assert found == pytest.approx(by_k, abs=1e-11)


def graded(index: int, score: float, nfe: int, text: str | None = None) -> Record:
    return record(index, scores={"exact_match": score}, nfe=nfe, text=text or f"text {index}")


def test_figures_of_two_prompts_by_hand() -> None:
    """Prompt 0: costs 2, 4, 8, the first correct. Prompt 1: nothing correct."""
    prompts = [
        [graded(0, 1, 2), graded(1, 0, 4), graded(2, 0.5, 8)],
        [graded(3, 0, 3), graded(4, 0, 3), graded(5, 0, 3)],
    ]
    found = passes.passes(prompts, "exact_match")
    assert [name for name in found if not name.endswith(("_low", "_high"))] == [
        "pass_at_1", "pass_at_2", "pass_at_nfe_2", "pass_at_nfe_4", "pass_at_nfe_8", "distinct_correct",
    ]  # fmt: skip
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 0) / 2)
    assert found["pass_at_2"] == pytest.approx((2 / 3 + 0) / 2)
    # of 6 orders the correct sample comes first in 2, second after the cost of 4 in 1, after 8 in 1
    assert found["pass_at_nfe_4"] == pytest.approx(2 / 6 / 2)
    assert found["pass_at_nfe_8"] == pytest.approx(3 / 6 / 2)
    low, high = statistics.interval([2 / 3, 0])
    assert (found["pass_at_2_low"], found["pass_at_2_high"]) == pytest.approx((low, high))
    assert found["distinct_correct"] == 0.5


def test_distinct_answers_are_correct_and_different() -> None:
    answers = [(1, "a, b"), (1, "b, a"), (1, "a, b "), (0, "a"), (0, "b")]
    assert passes.distinct([graded(0, score, 2, text) for score, text in answers], "exact_match") == 2
    ids = [[5, 6, 7, 0, 0, 0], [5, 6, 7, 0, 0, 9], [5, 6, 8, 0, 0, 0]]
    plain = [record(text=None, tokens=tokens) for tokens in ids]
    assert passes.distinct(plain, "exact_match") == 2, "what follows the end token is not the answer"


def sampled(scores: list[list[float]], operation: str = "shuffle") -> Run:
    """A run with several samples for each prompt."""
    samples = len(scores[0])
    flat = [score for prompt in scores for score in prompt]
    records = [graded(index, score, 2) for index, score in enumerate(flat)]
    return run(records, "random_order", operation, others={"samples": samples})


def test_intervals_are_over_prompts() -> None:
    """Samples of a prompt are alike: ten times as many of them say nothing about other prompts."""
    one = run([graded(index, index % 2, 2) for index in range(10)], "random_order")
    ten = sampled([[index % 2] * 10 for index in range(10)])
    assert ten.figures["samples"] == 100
    for name in ("score", "score_low", "score_high"):
        assert ten.figures[name] == pytest.approx(one.figures[name])
    assert ten.figures["pass_at_8"] == 0.5 and ten.figures["pass_at_8_low"] == one.figures["score_low"]
    assert not one.passes


def test_a_prompt_counts_once_all_its_samples_are_there() -> None:
    whole = sampled([[1, 0], [0, 0]])
    cut = Run({**whole.about, "samples": 4}, whole.records[:3])
    assert cut.missing == 1 and cut.figures["pass_at_2"] == 1
    assert not Run(whole.about, whole.records[:1]).passes


def test_over_several_tasks_it_is_the_mean_of_theirs() -> None:
    found = compare([sampled([[1, 0], [0, 0]]), sampled([[1, 0]] * 6, "copy")])
    assert found.passes == ["distinct_correct", "pass_at_1", "pass_at_2", "pass_at_nfe_2", "pass_at_nfe_4"]
    whole = found.figures["all tasks"]["random_order"]
    assert whole["pass_at_2"] == pytest.approx((0.5 + 1) / 2)
    ends = [found.figures[task]["random_order"] for task in ("shuffle", "copy")]
    gap = sum((one["pass_at_2"] - one["pass_at_2_low"]) ** 2 for one in ends) ** 0.5 / 2  # type: ignore[operator]
    assert whole["pass_at_2_low"] == pytest.approx(0.75 - gap)
    other = compare([sampled([[1, 0]]), run([record()], "fixed")])
    assert "pass_at_2" not in other.figures["all tasks"].get("fixed", {})


def test_the_page_and_the_table_have_them() -> None:
    runs = [sampled([[1, 0], [0, 0]]), run([record(index) for index in range(2)], "fixed", "shuffle")]
    shown = data(compare(runs), 1)
    titles = {one["name"]: one["title"] for one in shown["measures"]}
    assert titles["pass_at_2"] == "pass@2" and titles["pass_at_nfe_4"] == "pass@4 NFE"
    drawn, plain = (shown["views"]["all tasks"]["figures"][number] for number in (0, 1))
    assert drawn["pass_at_2"] == 0.5 and drawn["pass_at_2_low"] < 0.5 < drawn["pass_at_2_high"]
    assert plain["pass_at_2"] is None
    first, second = rows(runs)
    assert first["samples"] == 4 and first["samples_per_prompt"] == 2 and first["pass_at_2"] == 0.5
    assert second["samples_per_prompt"] == 1 and second["pass_at_2"] is None


class Own(Task):
    """Two prompts; the grade is the index."""

    def samples(self) -> list[Sample]:
        return [Sample(0, "a"), Sample(1, "b")]

    def grade(self, sample: Sample, answer: Answer) -> dict[str, float]:
        return {"score": float(sample.index)}


def test_a_task_repeats_its_prompts() -> None:
    task = Repeated(Own(), 3)
    samples = task.samples()
    assert [one.prompt for one in samples] == ["a", "a", "a", "b", "b", "b"]
    assert [one.index for one in samples] == list(range(6))
    assert [task.grade(one, Answer("", []))["score"] for one in samples] == [0, 0, 0, 1, 1, 1]
    assert task.score == "score" and task.form(samples[5]) is None


PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def example(*words: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Run the commands of the page, the first with more words. Returns its section and the rows of the CSV file."""
    section = PAGE.partition("## Several samples for each prompt")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.+?)```", section, re.DOTALL)
    evaluation, report = (shlex.split(line)[1:] for line in block.splitlines())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert evaluate([*evaluation, "device=cpu", "oracle=false", *words]) == 0
    assert write_report(report) == 0
    return section, {row["scheduler"]: row for row in csv.DictReader(Path("passes.csv").read_text().splitlines())}


def test_samples_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sample has a seed of its own, and those of a prompt are next to each other."""
    monkeypatch.chdir(tmp_path)
    _, table = example("task.count=2", "samples=3")
    assert "pass@2" in capsys.readouterr().out
    assert {row["samples"] for row in table.values()} == {"6"} and len(table) == 2
    for file in tmp_path.glob("*/*/*/samples.jsonl"):
        lines = [json.loads(line) for line in file.open()]
        assert [line["seed"] for line in lines] == list(range(6))
        assert len({line["prompt"] for line in lines[:3]}) == len({line["prompt"] for line in lines[3:]}) == 1
        assert lines[3]["prompt"] != lines[0]["prompt"]
        assert len({line["text"] for line in lines[:3]}) > 1


@pytest.mark.slow
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section, table = example()
    for name, *cells in re.findall(r"^\| `(\w+)` \|" + r" ([^|]+) \|" * 6, section, re.MULTILINE):
        row = table.pop(name)
        low, high = (float(row[f"pass_at_nfe_8_{end}"]) for end in passes.BOUNDS)
        assert cells == [
            f"{float(row['nfe']):.1f}",
            f"{100 * float(row['score']):.1f}",
            f"{float(row['pass_at_2']):.2f}",
            f"{float(row['pass_at_8']):.0f}",
            f"{float(row['pass_at_nfe_8']):.2f} [{low:.2f}, {high:.2f}]",
            f"{float(row['distinct_correct']):.1f}",
        ]
    assert not table, "the page has every run"


def test_one_sample_is_the_run_that_it_was() -> None:
    assert jobs(["samples=1"])[0].name == jobs([])[0].name != jobs(["samples=2"])[0].name
    with refused("option-range: samples, 0"):
        jobs(["samples=0"])
