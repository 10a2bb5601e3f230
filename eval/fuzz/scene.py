"""A folder with everything that commands read: what bad inputs are made of, and the commands themselves."""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from unittest.mock import patch

from dllm_sampler.eval.fuzz import folders
from dllm_sampler.eval.testbeds import checkpoint

MODULES = {  # what each command runs
    "dllm-sample": "dllm_sampler.cli.main",
    "dllm-eval": "dllm_sampler.eval.command",
    "dllm-train": "dllm_sampler.training.cli",
    "dllm-tune": "dllm_sampler.eval.tuning",
    "dllm-report": "dllm_sampler.eval.report.command",
    "python -m dllm_sampler.eval.conformance": "dllm_sampler.eval.conformance.__main__",
    "python -m dllm_sampler.integrations": "dllm_sampler.integrations.__main__",
}
TRAIN = ["train=mini", "train.steps=1", "train.data.size=64", "train.data.batch_tokens=100"]
TRACE = {
    "id": "a", "system": "dinfer-threshold", "source": "made up", "model": "ck", "prompt_ids": [5, 9], "nfe": 4,
    "params": {"gen_length": 4, "block_length": 4, "decoder": "threshold", "mask_id": 2, "eos_id": 1, "temperature": 0,
               "threshold": 0.9, "early_stop": True},
    "output_ids": [9, 9, 9, 9], "steps": [[0], [1], [2], [3]],
}  # fmt: skip
TEXTS = {
    "prompts.jsonl": '{"prompt": "copy: Ada"}\n{"messages": [{"role": "user", "content": "copy: Ben"}]}\n',
    "prompts.txt": "copy: Ada\nreverse: Ada, Ben\n",
    "task.jsonl": '{"prompt": "copy: Ada", "answer": "Ada"}\n{"prompt": "copy: Ben", "answer": "Ben"}\n',
    "schema.json": json.dumps(
        {"type": "object", "required": ["name"], "additionalProperties": False, "properties": {
            "name": {"enum": ["Ada", "Ben"]}, "age": {"type": "boolean"}}}
    ),
    "own.grammar": files("dllm_sampler.guides.grammar").joinpath("examples/arithmetic.grammar").read_text(),
    "conf/scheduler/own.yaml": "# Mine\n_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.7\n",
    "conf/task/own.yaml": "# Mine\n_target_: dllm_sampler.eval.tasks.waiting_line.Copy\ncount: 2\nseed: 0\n"
    "items: [3, 4]\ntemplate: null\n",
    "conf/suite/own.yaml": "# Mine\ncommon:\n  - task.count=1\n  - task.operation=copy\nsweeps:\n"
    '  - [scheduler=fixed, "scheduler.steps=2,4"]\n  - [scheduler=threshold]\n',
    "conf/tune/own.yaml": "# Mine\nname: found\ntrials: 1\nloss: 5.0\nmeasure: answer_tokens_per_forward\nseed: 0\n"
    "space:\n  scheduler:\n    threshold:\n      threshold: {low: 0.5, high: 0.9}\n  options:\n    block_length: [8]\n",
    "conf/train/own.yaml": (files("dllm_sampler.conf") / "train/sft.yaml").read_text(),
    "conf/experiment/tuned.yaml": "# @package _global_\n# Found by dllm-tune: 90 %\n"
    "defaults:\n  - override /cache: dual\n",
    "sft.jsonl": '{"prompt": "copy: Ada", "answer": "Ada"}\n{"prompt": [5, 7, 9], "answer": "Ben , Cal"}\n' * 3,
    "frequency.json": '{"num_token": 100, "p_baseline_dict": {"5": 3, "9": 20}}\n',
    "conf/experiment/mine.yaml": "# @package _global_\n# Mine\ndefaults:\n  - override /scheduler: factor\nseed: 6\n",
    "traces/t.jsonl": json.dumps(TRACE) + "\n",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


@cache
def scene() -> Path:
    """The folder, made once for each process."""
    folder = Path(tempfile.mkdtemp(prefix="dllm-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["DLLM_SAMPLER_CACHE"] = str(folder / ".cache")  # automata of forms
    (folder / "ck").mkdir()
    checkpoint.write(folder / "ck")
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    shutil.copy(str(files("dllm_sampler") / "models/mini/filter.safetensors"), folder / "filter.safetensors")
    small = ["scheduler=threshold", "task.operation=copy", "task.count=2", "max_new_tokens=8", "device=cpu"]
    with inside(folder):
        ended = called("dllm-eval", [*small, "output=runs"])
    assert ended.status == 0, ended
    run = folder / "runs" / "one"
    next((folder / "runs").glob("mini-*")).rename(run)
    samples = run / "samples.jsonl"
    folders.write(folder, folder / "ck")
    _unfinished(folder)
    lines = [
        json.loads(line) | {"times": {"seconds": 0.5, "batch": 2, "peak_memory": 1}}
        for line in samples.read_text().splitlines()
    ]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))  # a case is the same in every process
    return folder


def _unfinished(folder: Path) -> None:
    """A training run that was cut off behind its last step, with the state of the step."""
    cut = patch("dllm_sampler.training.mini.export", side_effect=KeyboardInterrupt)
    with inside(folder), cut, patch("time.perf_counter", return_value=0.0):  # a case is the same in every process
        called("dllm-train", [*TRAIN, "train.output=unfinished"])
    assert (folder / "unfinished/checkpoint.safetensors").exists()


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the scene, as the working directory."""
    with tempfile.TemporaryDirectory(prefix="dllm-fuzz-") as name:
        folder = Path(name) / "here"
        shutil.copytree(scene(), folder, ignore=shutil.ignore_patterns(".cache"))
        with inside(folder):
            yield folder


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """With a folder as the working directory."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def called(command: str, words: Sequence[str], given: str = "") -> Ended:
    """A command in this process; `given` comes from a pipe. What it raises goes through."""
    main: Callable[[Sequence[str]], int] = import_module(MODULES[command]).main
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    stdin, sys.stdin = sys.stdin, io.StringIO(given)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(list(words))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdin = stdin
    said = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]  # type: ignore[attr-defined]
    return Ended(status, *said)


def started(command: str, words: Sequence[str], given: str = "") -> Ended:
    """The same in a process of its own, as an installed command begins it."""
    line = [sys.executable, "-c", f"import sys; from {MODULES[command]} import main; sys.exit(main())", *words]
    done = subprocess.run(line, input=given.encode(), capture_output=True, check=False)
    return Ended(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))
