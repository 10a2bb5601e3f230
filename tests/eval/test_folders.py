"""A run's folder: full disks, files cut, lost or edited, clocks that go back, and a report meanwhile."""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dllm_sampler.errors import NotWrittenError, UserError
from dllm_sampler.eval import command
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.launch import launch, run_all
from dllm_sampler.eval.report import command as reports
from dllm_sampler.eval.runner import Share
from tests.disks import fail, full_after
from tests.refusals import refused
from tests.sampling import each

WORDS = ["task=mini", "task.operation=copy", "task.count=4", "batch_size=2", "device=cpu", "dtype=float64"]
WORDS += ["oracle=false", "max_new_tokens=16"]
COUNT = 4


def evaluate(output: Path) -> Path:
    """Run it, or what is missing of it; returns the folder of the run."""
    (job,) = jobs([*WORDS, f"output={output}"])
    assert run_all([job], Share(), "cpu", lambda job: None, lambda done: None) == {}
    return job.folder


def content(folder: Path) -> list[dict[str, Any]]:
    """The samples but for their times; each is there once, in order, and no part is left."""
    assert sorted(file.name for file in folder.iterdir()) == [".lock", "run.json", "samples.jsonl"]
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(COUNT))
    return [{name: value for name, value in line.items() if name != "times"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluate(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The folder of a whole run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_is_full_at_any_moment(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each call to the system in turn fails: one sentence, and the same command loses and doubles nothing."""
    number, reached = 0, True
    while reached:
        number += 1
        output = tmp_path / str(number)
        output.mkdir()
        with monkeypatch.context() as patch:
            calls = fail(patch, call, number)
            with suppress(NotWrittenError):
                evaluate(output)
            reached = len(calls) >= number
        for part in output.glob("*/part-*"):
            assert part.read_bytes().endswith(b"\n") or not part.stat().st_size
        assert content(evaluate(output)) == content(whole)
        assert json.loads((whole / "run.json").read_text()) == json.loads(next(output.glob("*/run.json")).read_text())
    assert number > 3, "a run makes several such calls, and each had its turn"


def test_the_command_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_after(2500):  # room for run.json, and not for two samples
        assert command.main([*WORDS, f"output={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    (folder,) = tmp_path.glob("mini*")
    assert out == "" and err.strip().startswith(f"dllm-eval: {folder}/part-") and err.strip().count("\n") == 0
    assert "File too large" in err
    about = RunFolder(folder).about()
    assert about is not None and about["refused"] is None, "it is no fault of the configuration"


def _cut(folder: Path, size: int) -> None:
    os.truncate(folder / "samples.jsonl", size)


@each(
    "damage",
    [
        lambda folder: _cut(folder, 0),
        lambda folder: _cut(folder, 300),
        lambda folder: _cut(folder, (folder / "samples.jsonl").stat().st_size - 1),
        lambda folder: _cut(folder, (folder / "samples.jsonl").read_bytes().index(b"\n") + 1),
        lambda folder: (folder / "run.json").unlink(),
        lambda folder: ((folder / "run.json").unlink(), _cut(folder, 300)),
        lambda folder: (folder / "samples.jsonl").unlink(),
        lambda folder: [(folder / name).unlink() for name in ("run.json", "samples.jsonl", ".lock")],
    ],
)
def test_a_run_that_was_cut_is_completed(whole: Path, copied: Path, damage: Callable[[Path], object]) -> None:
    damage(copied)
    assert content(evaluate(copied.parent)) == content(whole)
    assert json.loads((copied / "run.json").read_text()) == json.loads((whole / "run.json").read_text())
    assert RunFolder(copied).complete


@pytest.mark.slow
def test_measures_of_all_answers_come_back(tmp_path: Path) -> None:
    """They stand in `run.json` alone, and are found again where it was lost."""
    words = ["task=markov", "task.count=4", "scheduler=fixed", "device=cpu", f"output={tmp_path}", "oracle=false"]
    (job,) = jobs(words)
    for _ in range(2):
        assert run_all([job], Share(), "cpu", lambda job: None, lambda done: None) == {}
        about = RunFolder(job.folder).about()
        assert about is not None and about["measures"]
        (job.folder / "run.json").unlink()


def _edit(name: str, number: int, old: str, new: str) -> Callable[[Path], str]:
    """Replace text in a line of a file, from 1; returns what the sentence begins with."""

    def edit(folder: Path) -> str:
        lines = (folder / name).read_text().splitlines()
        number_ = number or next(at for at, line in enumerate(lines, 1) if old in line)
        assert old in lines[number_ - 1]
        lines[number_ - 1] = lines[number_ - 1].replace(old, new, 1)
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
        return f"{folder / name}, line {number_}: "

    return edit


def _set(text: str) -> Callable[[Path], str]:
    def edit(folder: Path) -> str:
        (folder / "run.json").write_text(text)
        return f"{folder / 'run.json'}, line "

    return edit


def _swap(old: str, new: str) -> Callable[[Path], str]:
    """An edit of `run.json` inside a field, whose line is named."""

    def edit(folder: Path) -> str:
        text = (folder / "run.json").read_text()
        assert old in text
        return _set(text.replace(old, new, 1))(folder)

    return edit


EDITS = [
    (_set("[]"), "run-damaged"),
    (_set("{"), "run-damaged"),
    (_set(""), "run-damaged"),
    (_set("[" * 100_000), "run-damaged"),
    (_set("NaN"), "run-damaged"),
    (_set("{}"), "run-damaged: name"),
    (_edit("run.json", 0, '"samples": 4', '"samples": "4"'), "run-damaged"),
    (_edit("run.json", 0, '"samples": 4', '"samples": -4'), "run-damaged: -4"),
    (_edit("run.json", 0, '"environments": [', '"environments": [7,'), "run-damaged"),
    (_edit("run.json", 0, '"score": "exact', '"score": 3, "o": "exact'), "run-damaged"),
    (_set('{"schema": 2, "name": "a"}'), "run-damaged: line 1"),
    (_set("[" * 100_000), "run-damaged"),
    (_swap('"refused"', '"refuseed"'), "run-damaged: line 1"),
    (_swap('"task": "', '"task": [], "o": "'), "run-damaged"),
    (_swap('"guide": []', '"guide": [7]'), "run-damaged"),
    (_swap('"count": 4', '"count": 4, "content": []'), "run-damaged"),
    (_edit("run.json", 0, '"measures": null', '"measures": {"a": "b"}'), "run-damaged"),
    (_edit("samples.jsonl", 2, '"index":1', '"index":"1"'), "run-damaged"),
    (_edit("samples.jsonl", 2, '"index":1', '"index":99'), "run-damaged"),
    (_edit("samples.jsonl", 2, '"index":1', '"index":-1'), "run-damaged"),
    (_edit("samples.jsonl", 2, '"index":1', '"index":true'), "run-damaged"),
    (_edit("samples.jsonl", 3, '"nfe":', '"nfe":-'), "run-damaged"),
    (_edit("samples.jsonl", 3, '"canvas":', '"canvas":1'), "run-damaged: 116"),
    (_edit("samples.jsonl", 3, '"step_map":[', '"step_map":[99,'), "run-damaged: step_map, 16"),
    (_edit("samples.jsonl", 3, '"confidence":[', '"confidence":["'), "run-damaged"),
    (_edit("samples.jsonl", 3, '"revisions":[', '"revisions":[[0,99,"a"]'), "run-damaged: 16"),
    (_edit("samples.jsonl", 3, '"revisions":[', '"revisions":[[0,1]'), "run-damaged"),
    (_edit("samples.jsonl", 1, '"exact_match"', '"exact"'), "run-damaged: exact_match"),
    (_edit("samples.jsonl", 1, '"seconds":', '"seconds":-'), "run-damaged"),
    (_edit("samples.jsonl", 4, '{"schema":2', '{"schema":7'), "run-damaged"),
    (_edit("samples.jsonl", 4, '"nfe"', '"more":1,"nfe"'), "run-damaged"),
    (_edit("samples.jsonl", 4, "{", "7 {"), "run-damaged"),
    (_edit("samples.jsonl", 3, '"tokens":[', '"tokens":[-'), "run-damaged: equal to 0"),
    (_edit("samples.jsonl", 4, "{", "[" * 100_000), "run-damaged"),
]


@pytest.mark.parametrize(("edit", "sentence"), EDITS)
def test_what_was_edited_is_named(copied: Path, edit: Callable[[Path], str], sentence: str) -> None:
    place = edit(copied)
    with refused(sentence) as error:
        RunFolder(copied).records()
    assert str(error.value).startswith(place)


@each("edit", [EDITS[0][0], EDITS[15][0]])
def test_both_commands_name_it_and_what_they_say_helps(
    whole: Path, copied: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], str]
) -> None:
    place = edit(copied)
    words = [*WORDS, f"output={copied.parent}"]
    for main, given in ((reports.main, [str(copied), "--csv", "-"]), (command.main, words)):
        assert main(given) == 2
        err = capsys.readouterr().err.strip()
        assert place in err and err.count("\n") == 0
    if "run.json" in place:  # remove the file, or the line
        (copied / "run.json").unlink()
    else:
        number = int(place.rpartition("line ")[2].partition(":")[0])
        lines = (copied / "samples.jsonl").read_text().splitlines(keepends=True)
        (copied / "samples.jsonl").write_text("".join(lines[: number - 1] + lines[number:]))
    assert content(evaluate(copied.parent)) == content(whole)


def test_another_number_of_samples_than_the_task_has(copied: Path) -> None:
    place = _edit("run.json", 0, '"samples": 4', '"samples": 5')(copied)
    with pytest.raises(UserError) as error:
        evaluate(copied.parent)
    assert str(error.value).startswith(f"{place}`samples` should be 4, not 5")


def test_a_clock_that_goes_back(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the time of day finds an hour less: nothing but the records' own times may differ."""
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    (job,) = jobs([*WORDS, f"output={tmp_path}"])
    assert content(evaluate(tmp_path)) == content(whole)
    times = [record.seconds for record in RunFolder(job.folder).records()]
    assert all(0 < seconds < 60 for seconds in times)


def test_a_report_shows_what_has_been_saved_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, f"output={tmp_path}"]
    seen: list[tuple[int, str]] = []
    add = RunFolder.add

    def look(*given: Any) -> None:
        for act in (lambda: None, lambda: add(*given)):
            act()
            status = reports.main([str(tmp_path), "--csv", "-"])
            seen.append((status, capsys.readouterr().err))

    monkeypatch.setattr(RunFolder, "add", look)
    assert launch(words, jobs(words), Console(quiet=True)) == {}
    assert [status for status, _ in seen] == [2, *[0] * 7]
    assert f"samples are under {tmp_path}" in seen[0][1]
    assert {said for _, said in seen[1:]} == {""}


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says is true."""
    words, add = [*WORDS, f"output={tmp_path}"], RunFolder.add

    def interrupted(*given: Any) -> None:
        add(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", interrupted)
        assert command.main(words) == 130
    assert capsys.readouterr().err.endswith("dllm-eval: interrupted. Rerun the command to resume.\n")
    (job,) = jobs(words)
    assert RunFolder(job.folder).done() == {0}
    assert command.main(words) == 0 and content(job.folder) == content(whole)


@pytest.mark.parametrize("name", ["samples.jsonl", "run.json", "part-1.jsonl"])
def test_a_folder_in_place_of_a_file(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    (copied / name).mkdir()
    with refused("file-unreadable: Is a directory") as error:
        RunFolder(copied).records()
    assert str(error.value).startswith(f"{copied / name} cannot be read")
