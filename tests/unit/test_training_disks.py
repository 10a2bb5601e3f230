"""`dllm-train` on full disks, and two of them on one folder: nothing lost, nothing doubled."""

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_sampler.core import telling
from dllm_sampler.errors import NotWrittenError, UserError
from dllm_sampler.eval.report import command as reports
from dllm_sampler.eval.state import running
from dllm_sampler.host import locks
from dllm_sampler.training import checkpoint, cli
from tests.disks import fail, full_after
from tests.unit.test_mini_training import words


def content(folder: Path) -> tuple[list[int], dict[str, Any]]:
    """The steps of the log, and the weights of the finished model; nothing else is left."""
    names = {"config.json", "generation_config.json", "log.jsonl", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json"}
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines], load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    (steps, weights), (others, more) = content(one), content(other)
    return steps == others == [7, 14] and all(torch.equal(weights[name], more[name]) for name in weights)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "whole"
    assert cli.main(words(folder, "train.steps=14")) == 0
    return folder


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    with full_after(4000):  # room for the log, and not for the weights
        assert cli.main(words(folder, "train.steps=14")) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"dllm-train: {folder / checkpoint.FILE} cannot be written: File too large; the same command goes on from the"
        " last saved state"
    )
    assert cli.main(words(folder, "train.steps=14")) == 0
    assert same(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_is_full_at_any_moment(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    number, reached = 0, True
    while reached:
        number += 1
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            calls = fail(patch, call, number)
            with suppress(NotWrittenError):
                cli.trainer(words(folder, "train.steps=14")).run()
            reached = len(calls) >= number
        if not (folder / "model.safetensors").exists():
            assert cli.main(words(folder, "train.steps=14")) == 0
        assert same(folder, whole), number
    assert number > 2


def test_the_log_is_written_before_the_state_that_vouches_for_it(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, a run makes the last lines again; the other way round it would lack them."""
    folder, plain = tmp_path / "m", checkpoint.save

    def killed(*given: Any) -> None:
        plain(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        assert cli.main(words(folder, "train.steps=14")) == 130
    assert cli.main(words(folder, "train.steps=14")) == 0
    assert same(folder, whole)


def test_states_that_were_damaged(tmp_path: Path) -> None:
    others: list[dict[str, str] | None] = [None, {"state": '{"step": 1}'}, {"state": "{"}]  # the first: something else
    for text, metadata in zip(("{", "[" * 100_000, "\xff"), others, strict=True):
        save_file({"model.a": torch.zeros(1)}, tmp_path / checkpoint.FILE, metadata)
        (tmp_path / "answers.json").write_text(text, encoding="latin-1")
        for read in (lambda: checkpoint.read_json(tmp_path / "answers.json"), lambda: checkpoint.settings(tmp_path)):
            with pytest.raises(UserError, match=r"is damaged \(.*\); remove it to start the run again$"):
                read()


def test_processes_that_train_together_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(output=str(tmp_path / "m"))
    with cli._alone(trainer):  # as the first of them holds it
        monkeypatch.setenv("RANK", "1")
        with cli._alone(trainer):
            pass


def test_one_trainer_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    with locks.locked(tmp_path / ".m.lock"):  # as another process holds it
        assert cli.main(words(folder)) == 2
    said = capsys.readouterr().err
    assert f"another dllm-train is writing {folder}: wait until it is done, or choose another train.output" in said
    assert os.listdir(tmp_path) == []


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for folder in ("new/deep/m", "mine/new/m"):
        given = ["train=sft", f"train.data={tmp_path / 'nowhere.jsonl'}", f"train.output={tmp_path / folder}"]
        assert cli.main(given) == 2
        assert "nowhere.jsonl" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == []


def test_a_second_terminal_sees_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the folder that is made, before it is there, and by the one that it lies in."""
    folder, save, seen = tmp_path / "m", checkpoint.save, list[list[str]]()

    def look(*given: Any) -> None:
        seen.append(running([folder]))
        assert running([tmp_path]) == seen[-1]
        assert reports.main([str(folder)]) == 0, "no runs are no mistake here"
        assert capsys.readouterr().err.endswith(f"{seen[-1][0]}\n")
        save(*given)

    monkeypatch.setattr(checkpoint, "save", look)
    monkeypatch.setattr(telling, "EVERY", 0.0)
    assert cli.main(words(folder, "train.steps=24")) == 0
    said = [line for (line,) in seen]
    assert [line.partition(", 0:0")[0] for line in said] == [
        f"{folder}: dllm-train is running, mini: {done} of 24"
        for done in (0, 0, 20, 20)  # as its bar
    ]
    assert "so far, about 0:0" in said[2]
    assert running([folder]) == running([tmp_path]) == [] and os.listdir(tmp_path) == ["m"]


def test_what_a_killed_training_left_is_not_its_state(tmp_path: Path) -> None:
    about = {"schema": 2, "command": "dllm-train", "done": 7, "total": 9}
    (tmp_path / ".m.lock").write_text(json.dumps(about))
    assert running([tmp_path / "m"]) == []
    with telling.telling(tmp_path / ".m.lock", "dllm-train"):
        telling.tell(1, 9, "steps")
        telling.tell(2, 9, "steps")  # too soon to be written
        assert [line.partition(", 0:")[0] for line in running([tmp_path])] == [
            f"{tmp_path / 'm'}: dllm-train is running, 1 of 9 steps"
        ]
        (tmp_path / ".m.lock").write_text("[" * 100_000)
        assert running([tmp_path]) == [], "an edited file says nothing"
    telling.tell(3, 9)  # no command runs: nothing happens
