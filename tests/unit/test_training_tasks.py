"""Every task on every family: two steps on a user's data by the command, and what is saved answers by `dllm-sample`."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm_sampler.cli import main as sample
from dllm_sampler.models import loading
from dllm_sampler.training import cli
from tests import tiny
from tests.sampling import sampled

FACTS = Path(__file__).parents[2] / "examples" / "facts.jsonl"
COMMON = ["steps=2", "held_out=2", "new_tokens=16", "warmup=0", "learning_rate=1e-2", "device=cpu", "evaluation={}"]
POLICY = ["prompts=2", "group=3", "rollout={temperature: 4.0}", "rewards={tests.unit.test_training_tasks:letters: 1}"]
TASKS = {
    "sft": ["batch=4"],
    "cjgrpo": POLICY,
    "grpo": POLICY,
    "distill": ["answers=4", "keep=false", "batch=2", "teacher={}"],
}


def letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Different for nearly all answers."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


@pytest.mark.parametrize("chosen", sampled(list(product(TASKS, tiny.EVERY)), lambda pair: [pair[0]], "-".join))
def test_every_task_and_family(chosen: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every task runs by default; what each family computes is compared with rows by hand elsewhere."""
    task, name = chosen
    model, output = tiny.write(name, tmp_path / "m"), tmp_path / "run"
    size = loading.load(model, device="cpu").denoiser.spec.block_length or 32
    words = [*COMMON, *TASKS[task], f"model={model}", f"data={FACTS}", f"output={output}"]
    words += [f"block_length={size}"] if task == "distill" else []
    status = cli.main([f"train={task}", *(f"train.{word}" for word in words)])
    said = " ".join(capsys.readouterr().err.split())
    assert status == 0, said
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2] and any(line["gradient"] > 0 for line in log[1:])
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) > len(before) / 2 and not any("expert_bias" in key for key in changed)
    assert sample.main([f"model={output}", "What is the capital of France?", "max_new_tokens=8", "device=cpu"]) == 0
    assert re.search(r" tokens? in ", capsys.readouterr().err)


@pytest.mark.parametrize("task", ["sft", "cjgrpo", "grpo", "distill", "filter", "deer"])
def test_a_prompt_without_room_is_told_before_the_first_step(
    task: str, llada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its line, although no step may come to it; and no answer has been sampled."""
    data, output = tmp_path / "data.jsonl", tmp_path / "run"
    lines = [{"prompt": "a" * (600 if line == 7 else 2), "answer": "b"} for line in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"model={llada}", f"data={data}", f"output={output}", "device=cpu"]
    more = {"filter": ["against=[]"], "deer": ["held_out=2", "separator=null"]}.get(task)
    words += [*COMMON, *TASKS[task]] if more is None else more
    assert cli.main([f"train={task}", *(f"train.{word}" for word in words)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"data.jsonl line 8 has {602 if task == 'sft' else 600} tokens" in error, error
    assert not list(output.glob("*")) and not list(tmp_path.glob("run.*"))


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA with a tokenizer of characters."""
    return tiny.write("llada", tmp_path_factory.mktemp("llada") / "m")


def test_what_runs_in_one_process_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train=mini", f"train.output={tmp_path / 'run'}"]) == 2
    assert "train=mini runs in one process" in capsys.readouterr().err
