"""What a newcomer does in an empty directory with the installed package, word for word as the documents have it."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler.eval.command import main
from dllm_sampler.eval.report.command import main as report

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def blocks(page: str, heading: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code behind a heading of a document, or bold words."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```(\w+)\n(.*?)^```$", text[text.index(heading) :], re.MULTILINE | re.DOTALL)


def first(found: list[tuple[str, str]], language: str, word: str) -> str:
    return next(text for kind, text in found if kind == language and word in text)


def command(line: str) -> str:
    """What an installed command prints."""
    program, *words = shlex.split(line, comments=True)
    script = [sys.executable, str(Path(sys.executable).parent / program)]
    done = subprocess.run([*script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts, answers and a metric; a run; its figures as a CSV file and in Python. Other files are left alone."""
    for name in ("random", "torch", "numpy", "pandas", "triton"):  # never imported from here
        Path(f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    found = blocks("tasks.md", "## Your own prompts and answers")
    Path("mine.jsonl").write_text(first(found, "json", "prompt"))
    Path("mymetric.py").write_text("import random\n" + first(found, "python", "def first_name"))
    assert re.search(r"n +score.*\n.*\n +threshold +jsonl +2 +100.0 ", command(first(found, "bash", "task.metric")))

    found = blocks("evaluation.md", "**CSV and data frames.**")
    _, *words = shlex.split(first(found, "bash", "--csv"), comments=True)
    assert report(words) == 0 and capsys.readouterr().out == "figures.csv\n"
    (row,) = csv.DictReader(Path("figures.csv").read_text().splitlines())
    assert (row["configuration"], row["score"], row["task.metric"]) == ("threshold", "1.0", "mymetric:first_name")
    assert row["grade.length"] == str((len("Cal, Ben, Ada") + len("Ada, Cal, Dan")) / 2)
    names: dict[str, Any] = {}
    exec(first(found, "python", "eval.load"), names)
    assert list(names["frame"]["score"]) == [1.0] and list(names["frame"]["samples"]) == [2]


def test_a_task_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks("tasks.md", "## A task in Python")
    Path("mytask.py").write_text(first(found, "python", "class Pair"))
    Path("conf/task").mkdir(parents=True)
    Path("conf/task/pair.yaml").write_text(first(found, "yaml", "_target_"))
    _, *words = shlex.split(first(found, "bash", "task=pair"))
    assert main([*words, "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\* threshold +pair +20 +100.0 ", out) and re.search(r"  fixed +pair +20 +100.0 ", out)
    assert main(["--help"]) == 0
    assert "task=pair: Two names to reverse." in capsys.readouterr().out


def test_rollouts_on_ones_own_data() -> None:
    lines = [{"prompt": "latin: 1_3_, _3_1, 2___, _41_", "completion": "1234, 4321, 2143, 3412"}]
    lines.append({"prompt": "shuffle: Ada, Ben, Cal", "completion": "Ben, Ada, Cal"})
    Path("names.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names: dict[str, Any] = {}
    found = blocks("training.md", "**Prompts and answers of your own.**")
    step, scores = first(found, "python", "names.jsonl"), first(found, "python", "recorded")
    exec(step.replace("optimizer.step()", "") + scores, names)
    assert names["recorded"].shape == (8, 32), "a number per position of the longest answer"
    counted = names["view"].valid[:, names["result"].trace.origin :]
    assert (names["now"] - names["recorded"])[counted].abs().max() < 1e-4, "these weights sampled"
    exec(step, names)
    exec(scores, names)
    assert (names["now"] - names["recorded"])[counted].abs().max() > 1e-3, "these have learned"
    assert len(names["result"].texts) == len(names["rewards"]) == 8
    assert 0 < names["rewards"].mean() < 1, "else there is nothing to learn"
    gradients = [parameter.grad for parameter in names["model"].parameters()]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_rewards_on_ones_own_data() -> None:
    """The page's command, for two steps on `mini`."""
    Path("mine.jsonl").write_text("".join(f'{{"prompt": "copy: Ada{at}", "completion": "Ada"}}\n' for at in range(9)))
    Path("my_module.py").write_text("def reward(completions, **_):\n    return [len(text) for text in completions]\n")
    line = first(blocks("training.md", "## Rewards and figures"), "bash", "my_module").replace("\\\n", " ")
    few = "train.model=mini train.use_cpu=true train.max_steps=2 train.per_device_train_batch_size=2 train.bf16=false"
    assert command(f"{line} {few}") == "my-grpo\n"
    log = json.loads(Path("my-grpo/trainer_state.json").read_text())["log_history"]
    assert [line["reward"] == line["reward/my_module:reward"] > 0 for line in log if "reward" in line] == [True] * 2
    assert "reward/correct" not in log[1]
