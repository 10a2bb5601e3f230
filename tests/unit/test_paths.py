"""Paths and JSON that cannot be: one sentence each, and no torch for what a command line says."""

import json
import re
from pathlib import Path

import pytest

from dllm_sampler import Sampler
from dllm_sampler.cli.compose import settings
from dllm_sampler.cli.inputs import records, request
from dllm_sampler.cli.words import split
from dllm_sampler.errors import UserError, short
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.host.paths import expanded
from dllm_sampler.models.loading import load
from dllm_sampler.models.weights import read_json
from dllm_sampler.training.cli import read as read_training
from tests.refusals import refused
from tests.sampling import each, few

LONG, HOMELESS = "a" * 5000, "~nobody-at-all/x"
SAID = {LONG: "a... (5000 characters)", HOMELESS: "~nobody-at-all"}


@each("path", SAID)
@each("option", ["model", "prompts_file", "output", "target"])
def test_options_that_are_paths(option: str, path: str) -> None:
    with pytest.raises(UserError) as caught:
        request(split(["copy: Ada", f"{option}={path}"]))
    assert str(caught.value).startswith(f"{option}={path[:90]}"[:90]) and SAID[path] in str(caught.value)
    assert len(str(caught.value)) < 300


@few("path", SAID)
def test_elsewhere(path: str) -> None:
    for what in (
        lambda: Sampler.from_pretrained(path),
        lambda: load(path),
        lambda: Sampler.from_pretrained("mini", scheduler={"name": "learn2pd", "filter": path}),
        lambda: Sampler.from_pretrained("mini", guide={"name": "json_schema", "schema": path}),
        lambda: Sampler.from_pretrained("mini", guide={"name": "grammar", "grammar": path}),
        lambda: jobs([f"output={path}"]),
        lambda: jobs([f"report={path}.html"]),
        lambda: jobs(["task=jsonl", f"task.file={path}", "task.metric=contains"])[0].built_task.samples(),
        lambda: read_training(["train=mini", f"train.output_dir={path}"]),
    ):
        with pytest.raises(UserError) as caught:
            what()
        assert len(str(caught.value)) < 400


def test_names_and_values_are_cut_in_sentences() -> None:
    for word in (f"scheduler={LONG}", f"seed={LONG}", f"dtype={LONG}", f"scheduler.{LONG}=3"):
        with pytest.raises(UserError) as error:
            settings([word])
        assert re.search(r"a\.\.\. \(500\d characters\)", str(error.value))
    assert short("x" * 200) == "x" * 200 and short("x" * 201) == "x" * 100 + "... (201 characters)"


def test_paths_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for name in ("file", "gone", "gone/gone", "file/gone"):
        assert expanded("it", f"~/{name}") == tmp_path / name
    with refused("path-invalid"):
        expanded("it", "a\0b")


@each("line", ["[" * 100_000, '{"prompt":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_json_in_too_many_brackets(line: str, tmp_path: Path) -> None:
    with refused("json-invalid: line 1"):
        records([line], "FILE")
    (tmp_path / "config.json").write_text(line)
    with refused("json-invalid"):
        read_json(tmp_path / "config.json")
    code = "json-invalid" if line.startswith("{") else "file-unreadable"
    with refused(f"{code}: guide.json_schema.schema"):
        Sampler.from_pretrained("mini", guide={"name": "json_schema", "schema": line})


@few(
    "word",
    [
        "seed=" + "[" * 999 + "]" * 999,
        "+x=" + "{a:" * 999 + "}" * 999,
        "scheduler.threshold=" + "${seed" * 999 + "}" * 999,
    ],
)
def test_overrides_in_too_many_brackets(word: str) -> None:
    with pytest.raises(UserError) as caught:
        settings([word])
    assert len(str(caught.value)) < 500


def test_an_auto_map_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer_config.json").unlink()
    for value in (7, "x", True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": value}))
        with refused("checkpoint-config-invalid: tokenizer_config.json, auto_map"):
            load(tmp_path)
