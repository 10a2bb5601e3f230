"""The command that writes the YAML of an engine: it says what is wrong, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dllm_sampler.cli.compose import settings
from dllm_sampler.engine.plugins import assemble
from dllm_sampler.integrations.__main__ import COMMAND, USAGE, main
from dllm_sampler.integrations.block import model
from dllm_sampler.integrations.settings import Settings
from tests.sampling import each

EXPERIMENT = """\
# @package _global_
# Found by dllm-tune: 95.0 % at 4.00 tokens per forward.
defaults:
- override /model: mini
- override /scheduler: localleap
- override /blocks: fixed
- override /stop: block
- override /cache: dual
- override /guide: [temperature, top_p]
scheduler:
  threshold: 0.85
guide:
  top_p: {p: 0.9}
block_length: 24
max_new_tokens: 64
"""


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def own(group: str, name: str, text: str) -> None:
    folder = Path("conf") / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str]:
    """What was written, and said on stderr."""
    assert main(words) == 0
    out, err = capsys.readouterr()
    return yaml.safe_load(out), err


WRONG = {
    "scheduler=treshold": "unknown scheduler 'treshold'. Did you mean 'threshold'",
    "scheduler=klass scheduler.treshold=0.9": "scheduler=klass has no field 'treshold'. Did you mean 'threshold'",
    "scheduler.threshold=high": "scheduler.threshold='high' is invalid. Set a number",
    "tempreature=1": "Did you mean 'temperature'",
    "temperature=-1": "temperature=-1 is invalid. Set a finite number of at least 0",
    "scheduler=klass,fixed": "has several values",
    "klass": "'klass' is not NAME=VALUE",
    "--multirun": "'--multirun' is not NAME=VALUE",
    "scheduler=wino": "scheduler=wino needs more than the logits of a block",
    "guide=regex guide.regex.pattern='[a'": "guide.regex.pattern='[a' cannot be used",
    "guide=choices guide.choices.choices=[[a],[b]]": "guide=choices has a list of forms",
    "guide=grammar guide.grammar.grammar=json": "guide=grammar judges whole answers",
    "guide=json_schema guide.json_schema.schema=s.json": "guide.json_schema.schema=s.json",
    "top_p=0.9": "top_p changes nothing at temperature 0",
    "blocks=adablock": "blocks=adablock",
    "model=mini": "the engine loads the model",
    "cache=dual": "the engine has a cache of its own",
    "stop=none": "the engine ends answers by itself",
    "max_new_tokens=9": "each request sets it",
    "stream=false": "stream=false does not belong in an engine's settings",
    "experiment=fast-dllm blocks=full": "experiment=fast-dllm sets blocks.length, a field that blocks=full does not",
}


@each("words", WRONG)
def test_mistakes_are_one_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert not out and WRONG[words] in last and last.startswith(f"{COMMAND}: ")


def test_help_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler=klass", "--help"]) == 0
    page, err = capsys.readouterr()
    assert page == USAGE and not err and max(map(len, page.splitlines())) <= 88
    for command in (line.strip() for line in page.splitlines() if line.startswith(f"  {COMMAND}")):
        if "experiment" not in command:
            words = command.removeprefix(COMMAND).partition(">")[0].split()
            assert main(words) == 0
            assert yaml.safe_load(capsys.readouterr().out)["scheduler"]["name"] == "klass"


@each(
    "words",
    [
        ["scheduler=klass", "scheduler.threshold=0.8", "temperature=0.7", "top_k=20", "block_length=16"],
        ["scheduler=localleap", "compat=true"],
        ["guide=[end_tokens,temperature,top_p]", "guide.temperature.measured=true", "guide.end_tokens.ids=[3]"],
        ["experiment=sorting"],
        ["experiment=sorting", "temperature=0.5"],
    ],
)
def test_what_is_written_is_what_the_words_mean(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own("experiment", "sorting", EXPERIMENT)
    written, _ = run(capsys, *words)
    chosen = settings(words)
    length = chosen.options.block_length or 32
    mine = Settings.read(written, "x.yaml").rule(length, mask_id=0, vocab_size=50).plugins
    options = {name: getattr(chosen.options, name) for name in ("temperature", "top_k", "top_p", "compat")}
    plugins = {group: chosen.plugins[group] for group in ("scheduler", "guide")}
    fixed = {"blocks": {"name": "fixed", "length": length}, "stop": None, "cache": None}
    assert mine == assemble(model(50, 0, (0,), length, torch.device("cpu")), **plugins, **fixed, **options)


def test_an_experiment_leaves_to_the_engine_what_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    own("experiment", "sorting", EXPERIMENT)
    written, said = run(capsys, "experiment=sorting")
    assert set(written) == {"scheduler", "guide", "block_size"} and written["block_size"] == 24
    assert written["scheduler"] == {**written["scheduler"], "name": "localleap", "threshold": 0.85}
    assert "left out, since the engine and its requests set them: cache=dual, stop=block, max_new_tokens=64" in said
    assert "temperature of each request" not in said, "its guides draw"


def test_who_chooses_the_temperature_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    written, said = run(capsys)
    assert written["scheduler"]["name"] == "threshold" and written["scheduler"]["threshold"] == 0.9
    assert "temperature" not in written
    assert "at the temperature of each request, by default 1 in SGLang" in said
    written, said = run(capsys, "temperature=0")
    assert written["temperature"] == 0 and not said


def test_a_count_over_answers_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run(capsys, "scheduler=ascending", "temperature=0")
    assert said.count("scheduler=ascending counts over an answer") == 1 == said.count("\n")


def test_a_schema_is_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.json").write_text('{"type": "boolean"}')
    written, said = run(capsys, "guide=json_schema", "guide.json_schema.schema=s.json", "temperature=0")
    Path("s.json").unlink()
    assert not said and Settings.read(written, "x.yaml").checked(32).form is not None


def test_a_scheduler_of_ones_own_keeps_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    own("scheduler", "mine", "_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.4\n")
    written, _ = run(capsys, "scheduler=mine")
    (Path("conf") / "scheduler" / "mine.yaml").unlink()  # a server has another working directory
    rule = Settings.read(written, "x.yaml").rule(8).plugins.scheduler
    assert type(rule).__name__ == "Threshold" and vars(rule)["threshold"] == 0.4
