"""The command that writes the figures of docs/schedulers.md: it runs, resumes, and reports missing methods."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from dllm_sampler import config
from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.sampler import Sampler
from tests.sampling import each
from tests.tables import credits, markdown, methods, schedulers
from tests.tables.answers import HARD, Tally
from tests.tables.schedulers import DOCS, NEEDS, ORACLE, SECTION, Row, front, main

FEW = ["--prompts", "2", "--tasks", "copy", "shuffle", "--max-new-tokens", "16", "--block-length", "16"]


RUN = {"fixed", "fixed steps=1", "threshold", "klass", "wino", "threshold blocks=adablock", ORACLE}


def few_methods(patch: pytest.MonkeyPatch) -> None:
    """A run of all takes long; that the document has a row for each is what `--check` says."""
    every = schedulers.methods
    patch.setattr(schedulers, "methods", lambda setup: {name: every(setup)[name] for name in RUN})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the document, filled by a run on two prompts."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "schedulers.md").write_text(markdown.fill(DOCS.read_text(), SECTION, ""))
    with pytest.MonkeyPatch.context() as patch:
        few_methods(patch)
        assert command(folder, *FEW) == 0
    return folder


def command(folder: Path, *arguments: str) -> int:
    return main(["--docs", str(folder / "schedulers.md"), "--output", str(folder / "out"), *arguments])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes down what is measured and not found in the store; the picture, which takes longer, is not drawn again."""
    few_methods(monkeypatch)
    monkeypatch.setattr(schedulers, "draw", lambda rows: b"")
    seen: list[str] = []
    answering = schedulers.answering

    def noted(base: Sampler, plugins: schedulers.Plugins, setup: schedulers.Setup) -> schedulers.Answer:
        seen.append(str(plugins["scheduler"]))
        return answering(base, plugins, setup)

    monkeypatch.setattr(schedulers, "answering", noted)
    return seen


def rows(folder: Path) -> dict[str, list[str]]:
    _, *lines = csv.reader((folder / "schedulers.csv").read_text().splitlines())
    return {name: cells for name, *cells in lines}


@pytest.mark.slow
def test_every_method_has_a_row(folder: Path) -> None:
    found = rows(folder)
    assert set(found) == RUN
    exact, _, rate, pace = found["fixed"]
    assert float(exact) == 100
    assert float(rate) > 0 and float(pace) > 0
    assert found[ORACLE][0] == exact
    assert float(rate) < float(found[ORACLE][2]) < float(found["fixed steps=1"][2])
    section = markdown.section((folder / "schedulers.md").read_text(), SECTION)
    ((_, *shown),) = markdown.tables(section or "")
    named = {name.strip("`"): line[1:] for line in shown for name in line[0].split(", ")}
    assert {"fixed steps=1", ORACLE} <= named.keys() <= RUN
    assert all(cells == found[name][:3] for name, cells in named.items())
    assert (folder / "schedulers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_rest_of_the_document_stays(folder: Path) -> None:
    before, after = (markdown.fill(file.read_text(), SECTION, "") for file in (DOCS, folder / "schedulers.md"))
    assert before == after
    assert not [file for file in folder.iterdir() if file.name.startswith(".")], "half-written files were left"


@pytest.mark.slow
def test_a_cut_run_resumes(folder: Path, measured: list[str]) -> None:
    document, store = folder / "schedulers.md", folder / "out" / "results.jsonl"
    before, figures = document.read_text(), {name: cells[:3] for name, cells in rows(folder).items()}
    lines = store.read_text().splitlines()
    (torn,) = [line for line in lines if '"name": "klass"' in line and '"task": "shuffle"' in line]
    store.write_text("\n".join([line for line in lines if line != torn] + [torn[:100]]))
    document.write_text(markdown.fill(before, SECTION, ""))
    assert command(folder, *FEW) == 0
    assert [one for one in measured if one not in NEEDS] == ["klass"]
    assert {name: cells[:3] for name, cells in rows(folder).items()} == figures
    measured.clear()
    assert command(folder, *FEW) == 0
    assert "klass" not in measured, "what stood behind the torn line was lost"


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedulers.md").write_text(DOCS.read_text())
    assert command(tmp_path, *FEW, "--check") == 1
    assert "no table" in capsys.readouterr().out
    text = schedulers.table_of(DOCS).read_text()
    one_less = re.sub(r"^wino,.*\n", "", text, flags=re.M)
    by_hand = re.sub(r"^(d2f,.*,)[\d.]+$", r"\1", one_less, flags=re.M)
    (tmp_path / "schedulers.csv").write_text(re.sub(r"^ccd,", "cdc,", by_hand, flags=re.M))
    capsys.readouterr()
    assert command(tmp_path, *FEW, "--check") == 1
    said = capsys.readouterr().out
    assert "no row for wino" in said
    assert "a row for cdc, which is not a method" in said
    assert "a row for d2f without a time" in said
    assert "no picture" in said


def test_the_tables_of_methods_are_made_from_conf() -> None:
    text = DOCS.read_text()
    assert text == methods.document(text), (
        f"docs/schedulers.md is older than the comments in conf/. Run {methods.COMMAND}"
    )
    assert text.count("\n| `") > len(config.names("scheduler"))


def test_credits_name_every_paper_of_conf() -> None:
    text = credits.document("<!-- credits --><!-- /credits -->")
    assert text.count("\n| [") == len(credits.users())
    assert credits.papers().keys() == credits.users().keys(), "a paper that no plug-in names"
    assert all(row["name"] and row["authors"] for row in credits.papers().values())


def test_rows_without_figures_have_a_reason() -> None:
    _, *lines = csv.reader(schedulers.table_of(DOCS).read_text().splitlines())
    named = {name: figures for name, *figures in lines}
    assert all(figures[0] == NEEDS[name] for name, figures in named.items() if not figures[2])


def test_papers_are_links() -> None:
    assert methods.linked("A's 1234.56789, B C, D 2345.67891") == (
        "[A's](https://arxiv.org/abs/1234.56789), B C, [D](https://arxiv.org/abs/2345.67891)"
    )


@each(
    ("about", "cells"),
    [
        ("Where (n + 1) fits (X's, arXiv 1234.56789).", ("Where (n + 1) fits", "X's 1234.56789")),
        ("All open blocks (X); several at once.", ("All open blocks; several at once", "X")),
        ("The leftmost masks.", ("The leftmost masks", "")),
    ],
)
def test_a_description_ends_with_its_paper(about: str, cells: tuple[str, str]) -> None:
    assert methods.described(about) == cells


def test_the_front() -> None:
    def row(name: str, right: int, nfe: int) -> Row:
        return Row(name, Tally(100, right, 1000, nfe), None, 1.0)

    rows = [row("a", 90, 100), row("b", 80, 100), row("c", 80, 50), row("d", 80, 50), row("e", 70, 60)]
    assert front([*rows, row(ORACLE, 100, 10)]) == {"a", "c", "d"}


def test_prompts_and_classes() -> None:
    assert set(HARD) < set(TASKS)
    task = TASKS["copy"]
    assert held_out_prompts(task, 3) == held_out_prompts(task, 5)[:3]
    assert held_out_prompts(task, 3, seed=1) != held_out_prompts(task, 3)
