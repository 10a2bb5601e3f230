"""Runs as rows: CSV files, data frames."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dllm_sampler.eval
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.launch import launch
from dllm_sampler.eval.report import command
from dllm_sampler.eval.report.rows import rows, text
from tests.eval.made import record, run
from tests.refusals import refused


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
    assert list(first)[:6] == ["configuration", "task", "dependency", "samples", "missing", "score"]
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
        (["gone", "--csv", "-"], "There is no folder gone"),
        ([str(tmp_path), "--csv", "old.csv"], "there are no samples under"),
        ([str(runs), "--csv", "file/a.csv"], "cannot write to file: "),
        ([str(runs), "--csv", "file"], "file is not a CSV file"),
        ([str(runs), "--csv", "folder.csv"], "folder.csv cannot be written: Is a directory"),
        ([str(runs), "--csv", "old.csv", "--output", "page.pdf"], "page.pdf is not an HTML file"),
    ):
        assert command.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.csv", "old.csv"]
    assert Path("old.csv").read_text() == "old"
