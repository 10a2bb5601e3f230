"""Configurations of a run, and results as rows."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dllm_sampler.eval
from dllm_sampler.errors import UserError
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.launch import launch
from dllm_sampler.eval.report import command, figure
from dllm_sampler.eval.report.data import compare, load, read
from dllm_sampler.eval.report.headline import sentences
from dllm_sampler.eval.report.page import data, page
from dllm_sampler.eval.report.rows import rows, text
from tests.eval.made import HERE, record, run
from tests.refusals import refused
from tests.sampling import each

# Runs as rows: CSV files, data frames


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schedulers on one task."""
    output = tmp_path_factory.mktemp("runs")
    words = ["scheduler=threshold,fixed", "task.count=2", "device=cpu", "oracle=false", f"output={output}"]
    assert launch(words, jobs(words), Console(quiet=True)) == {}
    return output


def table(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out)))


def test_a_row_has_names_figures_and_settings() -> None:
    graded = [record(index, scores={"exact_match": 1.0, "error_missing": 0.5 * index}) for index in range(2)]
    found = rows(
        [
            run(graded, "threshold", threshold=0.9, others={"guide": [{"name": "top_k", "k": 5}]}),
            run(graded[:1], "fixed", "sort", others={"stops": ["a", "b"]}),
            run([], "wino", refused="it cannot"),
        ]
    )
    first, second, third = found
    assert all(list(row) == list(first) for row in found)
    names = ["configuration", "task", "dependency", "samples", "missing", "samples_per_prompt", "score"]
    assert list(first)[:7] == names
    assert first["configuration"] == "threshold" and second["task"] == "sort"
    assert (first["score"], first["nfe"], first["samples"], first["scheduler.threshold"]) == (1.0, 2.0, 2, 0.9)
    assert (first["grade.error_missing"], second["grade.error_missing"]) == (0.25, 0.0)
    assert first["score_low"] < first["score_high"] == 1.0
    assert first["guide.top_k.k"] == 5 and second["guide.top_k.k"] is None
    assert third["refused"] == "it cannot" and third["samples"] == 0 and third["score"] is None
    one, two, three = table(text(found))
    assert one["score"] == "1.0" and one["seed"] == "0" and two["stops"] == '["a", "b"]' and three["score"] == ""


def test_no_text_is_a_formula() -> None:
    evil = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\tx", "\rx"]
    found = table(text([{f"={at}": cell for at, cell in enumerate(evil)} | {"n": -0.5, "t": "-3", "l": ["=1"]}]))
    assert found == [
        {f"'={at}": f"'{cell}".replace("\r", "\n") for at, cell in enumerate(evil)}
        | {"n": "-0.5", "t": "-3", "l": '["=1"]'}
    ]


def test_a_grade_that_some_answers_lack() -> None:
    """A metric of the user's own may say more of one answer than of another."""
    graded = [record(index, scores={"exact_match": 1.0} | ({"length": 4.0} if index > 1 else {})) for index in range(4)]
    (row,) = rows([run(graded, "fixed")])
    assert row["grade.length"] == 4.0


def test_a_task_whose_file_changed_is_two_tasks() -> None:
    task = {"name": "jsonl", "file": "mine.jsonl", "metric": "exact_match"}
    runs = [
        run([record()], scheduler, others={"task": {**task, "content": content}})
        for scheduler, content in (("fixed", "0123456789"), ("wino", "0123456789"), ("fixed", "abcdef0123"))
    ]
    assert [row["task"] for row in rows(runs)] == ["mini (012345)", "mini (012345)", "mini (abcdef)"]
    assert [row["task"] for row in rows(runs[:2])] == ["mini", "mini"]
    assert [row["configuration"] for row in rows(runs)] == ["fixed", "wino", "fixed"]


@pytest.mark.slow
def test_a_data_frame_or_rows(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame: Any = dllm_sampler.eval.load(runs)
    assert sorted(frame["scheduler"]) == ["fixed", "threshold"] and frame["score"].max() <= 1
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = dllm_sampler.eval.load(str(runs), runs)  # one folder twice is one folder
    assert isinstance(found, list) and [row["scheduler"] for row in found] == list(frame["scheduler"])
    monkeypatch.chdir(runs)
    with refused("file-missing"):
        dllm_sampler.eval.load()


def test_csv_files(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main([str(runs), "--csv", "-"]) == 0
    said = capsys.readouterr().out
    assert sorted(row["scheduler"] for row in table(said)) == ["fixed", "threshold"]
    assert command.main([str(runs), "--csv", "new/figures.csv"]) == 0
    assert capsys.readouterr().out == "new/figures.csv\n"
    assert Path("new/figures.csv").read_text() == said
    assert [str(path) for path in Path().rglob("*.*")] == ["new/figures.csv"], "no page that nobody asked for"
    assert command.main([str(runs), "--csv", "-", "--output", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert out == said and err.startswith("page.html ") and Path("page.html").exists()


def test_a_csv_file_is_whole_or_not_there(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("old.csv").write_text("old")
    Path("folder.csv").mkdir()
    for words, said in (
        (["gone", "--csv", "-"], "gone does not exist"),
        ([str(tmp_path), "--csv", "old.csv"], "No samples are under"),
        ([str(runs), "--csv", "file/a.csv"], "--csv=file/a.csv: file is a file, but must be a folder"),
        ([str(runs), "--csv", "file"], "--csv=file should end in .csv"),
        ([""], "RUNS is empty. Name a path."),
        ([str(runs), "--csv", "folder.csv"], "--csv=folder.csv is a folder. Name a file."),
        ([str(runs), "--csv", "old.csv", "--output", "page.pdf"], "page.pdf should end in .html"),
    ):
        assert command.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.csv", "old.csv"]
    assert Path("old.csv").read_text() == "old"


# What lm-evaluation-harness wrote with our model, in reports: the figures of its JSON, next to runs of dllm-eval


COUNTS = {
    "answers": 100, "answer_tokens": 5000, "canvas_tokens": 25600, "forwards": 1000, "seconds": 50.0,
    "tokens_per_forward": 5.0, "tokens_per_forward_low": 4.8, "tokens_per_forward_high": 5.2,
}  # fmt: skip


def write(folder: Path, scheduler: str = "threshold", threshold: float = 0.9, **changes: Any) -> Path:
    """A file of two tasks that generate, and one that does not."""
    names = {"model": "mini", "scheduler": scheduler, "blocks": "fixed", "stop": "prefix", "cache": "none"}
    settings = {"model": {"path": "mini"}, "scheduler": {"name": scheduler, "threshold": threshold}, "guide": []}
    tasks = {"gsm8k": COUNTS, "code": {**COUNTS, "answers": 300, "forwards": 9000}}
    found: dict[str, Any] = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "exact_match,strict-match": 0.5,
                "exact_match_stderr,strict-match": 0.05,
                "exact_match,flexible-extract": 0.75,
                "exact_match_stderr,flexible-extract": 0.04,
                "tokens_per_forward,none": 5.0,
                "forwards,none": 10.0,
            },
            "code": {"alias": "code", "bleu,none": 31.5, "pass@1,none": 1.0, "pass@1_stderr,none": 0.0},
            "piqa": {"alias": "piqa", "acc,none": 0.7, "acc_stderr,none": 0.01},
        },
        "n-shot": {"gsm8k": 5},
        "n-samples": {"gsm8k": {"original": 1319, "effective": 100}},
        "config": {
            "model": "dllm_sampler",
            "limit": 100.0,
            "dllm_sampler": {
                "schema": 1, "choices": {**names, "guide": "none"}, "config": settings, "environment": HERE,
                "tasks": tasks,
            },
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"results_{threshold}.json"
    file.write_text(json.dumps(found | changes))
    return file


def test_figures_are_those_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "out" / "mini")
    by_task = {row["task"]: row for row in rows(read([tmp_path]))}
    gsm = by_task["gsm8k"]
    assert (gsm["score"], gsm["samples"], gsm["missing"], gsm["scheduler"]) == (0.5, 100, 0, "threshold")
    assert (gsm["score_low"], gsm["score_high"]) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=1e-4)
    assert gsm["grade.exact_match (flexible-extract)"] == 0.75
    rates = ("answer_tokens_per_forward", "answer_tokens_per_forward_low", "answer_tokens_per_forward_high")
    assert [gsm[name] for name in rates] == [5.0, 4.8, 5.2]
    assert (gsm["nfe"], gsm["answer_tokens"], gsm["canvas_tokens_per_forward"]) == (10, 50, 25.6)
    assert (gsm["tokens_per_second"], gsm["seconds"], gsm["oracle_share"]) == (100, 0.5, None)
    code = by_task["code"]
    assert code["score"] == 1.0 and 0.98 < code["score_low"] < 1, "no error in all: Wilson's"
    assert code["grade.bleu"] == 31.5, "not a share"
    assert by_task["piqa"]["refused"].startswith("lm-evaluation-harness asked for likelihoods")
    assert by_task["piqa"]["score"] is None


def test_tasks_together_are_sums(tmp_path: Path) -> None:
    write(tmp_path)
    (method,) = load([tmp_path]).methods
    both = method.figures(["gsm8k", "code"])
    assert both["score"] == 0.75 and both["samples"] == 400
    assert both["answer_tokens_per_forward"] == pytest.approx(10_000 / 10_000)
    assert both["canvas_tokens_per_forward"] == pytest.approx(51_200 / 10_000)
    assert both["nfe"] == 25 and both["tokens_per_second"] == 100
    assert both["answer_tokens_per_forward_low"] is None and both["kendall"] is None


def test_they_are_in_the_page_and_the_figure_of_runs(tmp_path: Path) -> None:
    for threshold in (0.5, 0.9):
        write(tmp_path, threshold=threshold)
    runs = [run([record(i) for i in range(4)], "threshold", "copy", threshold=threshold) for threshold in (0.5, 0.9)]
    found = compare([*runs, *read([tmp_path])])
    assert [method.label for method in found.methods] == ["threshold 0.5", "threshold 0.9"], "one method, three tasks"
    assert set(found.tasks) == {"mini", "gsm8k", "code"}
    assert set(found.figures["all tasks"]) == {"threshold 0.5", "threshold 0.9"}
    assert all("nan" not in line for line in sentences(found))
    assert "threshold 0.9" in page(found, "Both", 2)
    assert data(found, 2)["methods"][0]["runs"]["gsm8k"]["replays"] == []
    (line,) = figure.lines(found, found.figures["all tasks"])
    assert [method.settings["threshold"] for method in line] == [0.5, 0.9]


def test_reruns_are_told_apart_and_other_models_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", **{"n-shot": {"gsm8k": 5}, "date": 2.0})
    write(tmp_path / "b", threshold=0.1, config={"model": "hf"})
    assert [method.label for method in load([tmp_path]).methods] == ["threshold (a)", "threshold (b)"]


@each(
    ("content", "said"),
    [
        *((content, "has the name of a results file of") for content in ("{", "[]", "{}", '{"config": 3}')),
        ('{"config": {"dllm_sampler": {"schema": 2}}}', "is from another version of dllm_sampler (schema 2, not 1)"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "results_1.json").write_text(content)
    with pytest.raises(UserError) as error:
        read([tmp_path])
    assert f"results_1.json {said}" in str(error.value) and "\n" not in str(error.value)
