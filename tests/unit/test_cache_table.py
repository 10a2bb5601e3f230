"""The command that makes the table of docs/caches.md, and memory that caches hold."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from dllm_sampler import config
from tests import toys
from tests.tables import caches as table
from tests.tables import markdown
from tests.tables.caches import APART, DOCS, HEAD, SECTION, Figures, Row, bytes_held, caches, main

MARKS = f"<!-- {SECTION} -->\n<!-- /{SECTION} -->\n"


RUN = ["none", "dual", "dllm", "elastic", "sparse", "none random_order"]


def few_caches(patch: pytest.MonkeyPatch) -> None:
    """A run of all takes long; that the document has a row for each is what `--check` says."""
    patch.setattr(table, "caches", lambda: RUN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document filled by a run on two prompts."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "caches.md").write_text(f"before\n{MARKS}after\n")
    with pytest.MonkeyPatch.context() as patch:
        few_caches(patch)
        assert command(folder, "--smoke") == 0
    return folder


def command(folder: Path, *arguments: str) -> int:
    return main(["--docs", str(folder / "caches.md"), "--output", str(folder / "out"), *arguments])


def rows(folder: Path) -> dict[str, dict[str, str]]:
    section = markdown.section((folder / "caches.md").read_text(), SECTION)
    assert section is not None
    (table,) = markdown.tables(section)
    assert tuple(table[0]) == HEAD
    return {line[0].strip("`"): dict(zip(HEAD, line, strict=True)) for line in table[1:]}


@pytest.mark.slow
def test_every_cache_has_a_row(folder: Path) -> None:
    found = rows(folder)
    assert set(found) == set(RUN)
    for name, row in found.items():
        stores = not name.startswith("none")
        assert (float(row["positions"]) < 100) == stores, name
        assert (float(row["bytes per token"]) > 0) == stores, name
        assert float(row["time"]) > 0
    # Sparse-dLLM keeps half of the dual cache's keys, dLLM-Cache two more buffers of the same width.
    held = {name: float(row["bytes per token"]) for name, row in found.items()}
    assert held["sparse"] < 0.6 * held["dual"] < held["dual"] < held["dllm"] / 1.9
    assert (folder / "caches.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "caches.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n")


@pytest.mark.slow
def test_a_cut_run_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    measure = table.measure

    def noted(*arguments: object) -> Figures:
        if arguments[-1].max_steps is None:  # type: ignore[attr-defined] # else it warms up
            measured.append(arguments[1]["cache"])  # type: ignore[index]
        return measure(*arguments)  # type: ignore[arg-type]

    few_caches(monkeypatch)
    monkeypatch.setattr(table, "measure", noted)
    before, file = rows(folder), folder / "out" / "results.jsonl"
    assert command(folder, "--smoke") == 0
    assert measured == [] and rows(folder) == before
    lines = file.read_text().splitlines()
    (torn,) = [line for line in lines if '"name": "elastic"' in line and '"task": "latin"' in line]
    file.write_text("\n".join([line for line in lines if line != torn] + [torn[:200]]))
    assert command(folder, "--smoke") == 0
    assert measured == ["elastic"]
    timeless = [name for name in HEAD if name != "time"]
    after = rows(folder)
    assert [[after[name][key] for key in timeless] for name in before] == [
        [before[name][key] for key in timeless] for name in before
    ]


def test_the_document_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    text = DOCS.read_text()
    changed = re.sub(r"^\| `dual`.*\n", "", text, flags=re.M).replace("`sparse`", "`spar`")
    changed = re.sub(r"^(\| `d2f` \| )[\d.]+( \|)", r"\1\2", changed, flags=re.M)
    (tmp_path / "caches.md").write_text(changed)
    capsys.readouterr()
    assert command(tmp_path, "--check") == 1
    said = capsys.readouterr().out
    assert "no row for dual" in said
    assert "a row for spar, which is no cache" in said
    assert "does not mention cache=sparse" in said
    assert said.count("a row for `d2f` without a time") == 1
    assert "no picture" in said


def test_figures_of_a_row() -> None:
    def figures(answers: tuple[tuple[int, ...], ...], **given: float) -> Figures:
        sums = dict.fromkeys(table.SUMS, 0) | {"steps": 4, "columns": 80, "computed": 80} | given
        return Figures(answers=answers, bytes_per_token=1.0, **sums)  # type: ignore[arg-type]

    true = figures(((5, 6, 7, 0), (8,)))
    mine = figures(((5, 9, 7), (8, 3)), computed=20, seconds=2.0, repeated=2, seconds_without=4.0)
    row = Row("some", mine, true)
    assert row.agreement == 60  # a missing token is a wrong one, one behind the answer counts for nothing
    assert (row.share, row.ratio) == (25, 0.25)
    both = Figures.total([true, mine])
    assert (both.steps, both.answers, both.bytes_per_token) == (8, true.answers + mine.answers, 1.0)


def test_bytes_held_counts_each_storage_once() -> None:
    sampler = toys.sampler(cache="dual")
    cache = sampler.plugins.cache
    assert bytes_held(cache) == 0
    held = torch.zeros(3, 4, dtype=torch.float64)
    cache.memory = {"one": [held, held[1:], (held.view(12),)], "other": torch.zeros(5, dtype=torch.bool)}
    assert bytes_held(cache) == 96 + 5


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    """Three generations under each cache leave no tensor behind that one does not."""
    samplers = {}
    for name in config.names("cache"):
        if name not in ("block_causal", "sub_block"):
            scheduler = "random_order" if name == "dkv_greedy" else {"name": "threshold", "threshold": 0.6}
            samplers[name] = toys.sampler(cache=name, scheduler=scheduler)

    def alive() -> int:  # once for all caches: looking at every object takes longer than all generations
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    for sampler in samplers.values():
        sampler.generate(toys.PROMPTS, max_new_tokens=6)
    before = alive()
    for name, sampler in samplers.items():
        for _ in range(3):
            sampler.generate(toys.PROMPTS, max_new_tokens=6)
        assert bytes_held(sampler.plugins.cache) == 0, f"the template of {name} keeps what belongs to a generation"
    assert alive() <= before


def test_all_caches_are_run() -> None:
    assert {*caches(), *APART} - {"none random_order"} == set(config.names("cache"))
