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

from dllm_sampler.errors import NotWrittenError
from dllm_sampler.host import files
from dllm_sampler.training import checkpoint, cli
from tests.disks import fail, full_after
from tests.refusals import refused
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
            with refused("run-damaged"):
                read()


def test_processes_that_train_together_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(output=str(tmp_path / "m"))
    with cli._alone(trainer):  # as the first of them holds it
        monkeypatch.setenv("RANK", "1")
        with cli._alone(trainer):
            pass


def test_one_trainer_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    with files.locked(tmp_path / ".m.lock"):  # as another process holds it
        assert cli.main(words(folder)) == 2
    said = capsys.readouterr().err
    assert f"another dllm-train is writing {folder}" in said
    assert os.listdir(tmp_path) == []


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for folder in ("new/deep/m", "mine/new/m"):
        given = ["train=sft", f"train.data={tmp_path / 'nowhere.jsonl'}", f"train.output={tmp_path / folder}"]
        assert cli.main(given) == 2
        assert "nowhere.jsonl" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == []
