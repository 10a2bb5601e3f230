"""Tasks, rewards and files of the user's own: mistakes in them, and runs once they have changed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler.eval.command import main
from dllm_sampler.eval.jobs import jobs
from tests.sampling import each

CODE = """
from dataclasses import dataclass
from dllm_sampler.eval.tasks.base import Sample, Task

@dataclass
class Pair(Task):
    def samples(self):
        return {samples}

    def grade(self, sample, answer):
        return {grade}

    def together(self, samples, answers):
        return {together}

    def prompt(self, sample, tokenizer):
        return {prompt}
"""
GOOD = {
    "samples": '[Sample(i, "reverse: Ada, Ben") for i in range(self.count)]',
    "grade": '{"score": sample.index / 2}',
    "together": '{"mean": 0.5}',
    "prompt": "sample.prompt",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("mytask", "myreward"):
        sys.modules.pop(name, None)


def write(**parts: str) -> None:
    sys.modules.pop("mytask", None)
    Path("conf/task").mkdir(parents=True, exist_ok=True)
    Path("conf/task/pair.yaml").write_text("# Two names.\n_target_: mytask.Pair\ncount: 3\nseed: 0\n")
    code = CODE
    for name, text in {**GOOD, **parts}.items():
        code = code.replace(f"{{{name}}}", text)
    Path("mytask.py").write_text(code)


@each(
    ("part", "text", "said"),
    [
        ("samples", "None", "samples() returned None. Return a list of at least one Sample."),
        ("samples", "[]", "samples() returned []."),
        ("samples", '["a"]', "samples() returned ['a']."),
        ("samples", '[Sample(0, "a")] * 3', "sample 2"),
        ("samples", '[Sample(1, "a")]', "sample 1"),
        ("samples", "[Sample(0, 5)]", "the prompt of sample 1 is 5."),
        ("samples", '[Sample(0, [{"role": {1}}])]', "the prompt of sample 1 is [{'role': {1}}]."),
        ("samples", '{}["a"]', "samples() raised KeyError ('a'"),
        ("grade", "None", "grade() of sample 1 returned None"),
        ("grade", "1.0", "grade() of sample 1 returned 1.0."),
        ("grade", '{"score": 7}', "grade() of sample 1 returned {'score': 7}."),
        ("grade", '{"score": "yes"}', "grade() of sample 1 returned {'score': 'yes'}."),
        ("grade", '{"exact": 1}', "grade() of sample 1 returned {'exact': 1}."),
        ("grade", '{"score": 1, "other": float("nan")}', "grade() of sample 1 returned"),
        ("grade", "1 / 0", "grade() of sample 1 raised ZeroDivisionError (division by zero"),
        ("grade", "exit(0)", "grade() of sample 1 raised SystemExit (0"),
        ("together", "5", "together() returned 5."),
        ("together", '{}["a"]', "together() raised KeyError ('a'"),
        ("prompt", "3", "prompt() returned 3. Make it text, messages or token ids."),
        ("prompt", "1 / 0", "prompt() raised ZeroDivisionError (division by zero"),
    ],
)
def test_mistakes_are_one_sentence(part: str, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(**{part: text})
    assert main(["task=pair", "output=o"]) == 2
    assert f"task=pair: {said}" in capsys.readouterr().err


def test_what_a_mistake_left_behind_is_not_in_the_way() -> None:
    write(grade="1 / (1 - sample.index)")
    assert main(["task=pair", "output=o", "batch_size=1"]) == 2
    write()
    assert main(["task=pair", "output=o"]) == 0


def names(*words: str) -> list[str]:
    return [one.name for one in jobs(list(words))]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("mytask.py", ["task=pair"]),
        ("schema.json", ["guide=json_schema", "guide.schema=schema.json"]),
        ("rules.txt", ["guide=grammar", "guide.grammar=rules.txt"]),
        ("myreward.py", ["scheduler=svdd", "scheduler.reward=myreward:reward"]),
        ("mine.jsonl", ["task=jsonl", "task.file=mine.jsonl"]),
        ("mypackage/inner.py", ["scheduler=svdd", "scheduler.reward=mypackage.judge:reward"]),
        ("mymetric.py", ["task=jsonl", "task.file=mine.jsonl", "task.metric=mymetric:score"]),
    ],
)
def test_a_file_that_changed_is_another_run(file: str, words: list[Any]) -> None:
    write()
    Path("schema.json").write_text('{"type": "integer"}')
    Path("rules.txt").write_text('start: "a"\n')
    Path("myreward.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    Path("mine.jsonl").write_text('{"prompt": "copy: Ada", "answer": "Ada"}\n')
    Path("mymetric.py").write_text("def score(**_):\n    return 1.0\n")
    Path("mypackage").mkdir()
    for file_of_package in ("__init__", "inner", "judge"):
        Path(f"mypackage/{file_of_package}.py").write_text("")
    before = names(*words)
    text = Path(file).read_text()
    Path(file).write_text(text + "\n")
    assert names(*words) != before
    Path(file).write_text(text)
    assert names(*words) == before


def test_installed_code_counts_and_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site, words = tmp_path / "site/installed", ["scheduler=svdd", "scheduler.reward=installed.deep.judge:reward"]
    (site / "deep").mkdir(parents=True)
    for file in ("__init__", "deep/__init__", "deep/judge"):
        (site / f"{file}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(site.parent))
    before = names(*words)
    (site / "deep/judge.py").write_text("raise SystemExit\n")
    assert names(*words) != before


def test_settings_that_name_no_file_are_the_runs_that_they_were() -> None:
    assert "content" not in jobs(["task=mini"])[0].identity
    assert "content" not in jobs(["task=mini"])[0].identity["task"]
