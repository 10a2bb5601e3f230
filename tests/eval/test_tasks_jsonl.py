"""The task of a user's own prompts and answers."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import config
from dllm_sampler.eval import command
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.tasks.base import Answer
from dllm_sampler.host import patterns
from tests.refusals import refused
from tests.sampling import each

LINES = [
    {"prompt": "copy: Ada, Ben", "answer": "Ada, Ben"},
    {"messages": [{"role": "user", "content": "copy: Ada"}], "answer": ["Ada", "Ada."]},
    {"prompt": [5, 7, 9], "answer": "x", "level": 3},
]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(lines: Sequence[Any], name: str = "mine.jsonl") -> None:
    Path(name).write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))


def task(**fields: Any) -> Any:
    return config.build("task", {"name": "jsonl", "file": "mine.jsonl", **fields})


def score(of: Any, index: int, text: str) -> float:
    return of.grade(of.samples()[index], Answer(text, [1, 2]))["score"]


def test_samples_are_the_lines() -> None:
    written([LINES[0], "", *LINES[1:]])
    found = task()
    assert [sample.prompt for sample in found.samples()] == [LINES[0]["prompt"], LINES[1]["messages"], [5, 7, 9]]
    assert [found.source(sample) for sample in found.samples()] == [f"mine.jsonl line {n}" for n in (1, 3, 4)]
    assert len(task(count=2).samples()) == 2
    settings = {key for key in config.entry("task", "jsonl").settings if key != "_target_"}
    assert settings == {field.name for field in fields(found)}


@each(
    ("metric", "answer", "right", "wrong"),
    [
        ("exact_match", "Ada", ["Ada", " Ada\n"], ["Ada.", "ada", ""]),
        ("exact_match", ["Ada", "Eve"], ["Ada", "Eve"], ["Ada Eve"]),
        ("contains", "Ada", ["to Ada, then"], ["to Ad a"]),
        ("contains", ["x", "y"], ["xyz", "y"], ["z"]),
        ("regex", r"^\d+$", ["42"], ["a 42", "four"]),
        ("regex", r"\d", ["a 42"], ["four"]),
    ],
)
def test_metrics(metric: str, answer: Any, right: list[str], wrong: list[str]) -> None:
    written([{"prompt": "copy: Ada", "answer": answer}])
    found = task(metric=metric)
    assert [score(found, 0, text) for text in [*right, *wrong]] == [1.0] * len(right) + [0.0] * len(wrong)


def test_a_metric_of_the_users_own() -> None:
    Path("jsonl_metric.py").write_text(
        "def all(**given):\n"
        "    assert sorted(given) == ['answer', 'ids', 'line', 'prompt', 'text']\n"
        "    return {'score': given['line']['level'] / 4, 'tokens': len(given['ids'])}\n"
        "def number(text, answer, **_): return text == 'x' and answer is None\n"
        "def large(**_): return 7\n"
        "def words(**_): return 'good'\n"
        "def nan(**_): return float('nan')\n"
        "def nameless(**_): return {'level': 1}\n"
        "def broken(**_): raise KeyError('name')\n"
    )
    written([LINES[2], {"prompt": "copy: Ada"}])
    found = task(metric="jsonl_metric:all")
    assert found.grade(found.samples()[0], Answer("x", [1, 2])) == {"score": 0.75, "tokens": 2.0}
    assert score(task(metric="jsonl_metric:number"), 1, "x") == 1.0
    for name in ("large", "words", "nan", "nameless"):
        with refused(f"function-result: mine.jsonl, line 1, task.metric=jsonl_metric:{name}"):
            score(task(metric=f"jsonl_metric:{name}"), 0, "x")
    with refused("function-failed: mine.jsonl, line 2, task.metric=jsonl_metric:broken"):
        score(task(metric="jsonl_metric:broken"), 1, "x")


@each(
    ("line", "said"),
    [
        ("{", "json-invalid: line 2"),
        ('"copy: Ada"', "example-invalid: line 2"),
        ({"answer": "a"}, "prompt-missing: line 2"),
        ({"prompt": 3, "answer": "a"}, "prompt-type: line 2"),
        ({"prompt": "a"}, "example-invalid: line 2, task.metric=regex"),
        ({"prompt": "a", "answer": []}, "example-invalid: line 2"),
        ({"prompt": "a", "answer": ["b", 3]}, "example-invalid: line 2"),
        ({"prompt": "a", "answer": "("}, "example-invalid: line 2"),
        ({"prompt": "a", "answer": "a{99999999999}"}, "example-invalid: line 2"),
        ({"prompt": "a", "answer": "((a{99}){99}){99}"}, "example-invalid: line 2"),
        ({"prompt": "a", "answer": "(" * 5000 + ")" * 5000}, "example-invalid: line 2"),
        ('{"prompt": "\\udc80", "answer": "a"}', "text-invalid: line 2"),
    ],
)
def test_a_wrong_line_is_named(line: Any, said: str) -> None:
    written([LINES[0], line])
    with refused(said):
        task(metric="regex")


def test_a_pattern_that_backtracks_without_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    written([{"prompt": "a", "answer": "(a|aa)+$"}])
    found = task(metric="regex")
    assert score(found, 0, "xaaa") == 1.0
    said = "function-failed: mine.jsonl, line 1, task.metric=regex"
    with refused(said):
        score(found, 0, "a" * 200 + "b")


def test_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").touch()
    written([LINES[0], "", {"prompt": "sing: Ada, Ben", "answer": ""}])
    for words, said in (
        ([], "task=jsonl needs a file. Add task.file=FILE.jsonl"),
        (["task.file=gone.jsonl"], "Cannot read task.file=gone.jsonl (No such file"),
        (["task.file=empty.jsonl"], "task.file=empty.jsonl has no JSON lines"),
        (["task.file=mine.jsonl", "task.metric=exact"], "unknown task.metric 'exact'. Did you mean 'exact_match'?"),
        (["task.file=mine.jsonl", "task.metric=gone:f"], "task.metric=gone:f cannot be imported"),
        (["task.file=mine.jsonl", "task.count=0"], "task.count=0 is invalid. Set a whole number of at least 1"),
        (["task.file=mine.jsonl"], "mine.jsonl line 3: prompt 2 has 'sing'"),
    ):
        assert command.main(["task=jsonl", "device=cpu", *words]) == 2
        assert f"dllm-eval: {said}" in capsys.readouterr().err
    assert not list(Path("outputs").rglob("*.jsonl")), "no sample was run before the mistake was found"


def test_a_changed_file_or_metric_is_another_run() -> None:
    Path("jsonl_changed.py").write_text("def f(**_): return 1\n")
    words = ["task=jsonl", "task.file=mine.jsonl", "task.metric=exact_match,jsonl_changed:f"]

    def names() -> list[str]:
        return [job.name for job in jobs(words)]

    written(LINES[:2])
    first = names()
    assert names() == first
    written([LINES[0], {**LINES[1], "answer": "Eve"}])
    other = names()
    assert not {*first} & {*other}
    Path("jsonl_changed.py").write_text("def f(**_): return 0\n")
    assert names()[0] == other[0] and names()[1] != other[1]
    again = pickle.loads(pickle.dumps(jobs(words)[1]))
    assert "built_task" not in vars(again) and again.name == names()[1]


def test_texts_of_ones_own_are_part_of_a_run_too() -> None:
    words = ["task=paraphrase", "task.file=mine.jsonl", "task.count=1"]
    written([{"text": "One."}])
    (first,) = jobs(words)
    name = first.name
    written([{"text": "Two."}])
    assert jobs(words)[0].name != name
