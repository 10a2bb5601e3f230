"""A folder with everything that commands read, and the commands."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests import checkpoint, tiny

ENGINE = "python -m dllm_sampler.integrations"
MODULES = {
    "dllm-sample": "dllm_sampler.cli.main",
    "dllm-eval": "dllm_sampler.eval.command",
    "dllm-train": "dllm_sampler.training.cli",
    "dllm-tune": "dllm_sampler.eval.tuning",
    "dllm-report": "dllm_sampler.eval.report.command",
    ENGINE: "dllm_sampler.integrations.__main__",
}
TARGET = "tiny-qwen2-verifier"
SCHEMA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {"name": {"enum": ["Ada", "Ben"]}, "age": {"type": "boolean"}},
}
TEXTS = {
    "prompts.jsonl": '{"prompt": "copy: Ada"}\n{"messages": [{"role": "user", "content": "copy: Ben"}]}\n',
    "prompts.txt": "copy: Ada\nreverse: Ada, Ben\n",
    "task.jsonl": '{"prompt": "copy: Ada", "answer": "Ada"}\n{"prompt": "copy: Ben", "answer": "Ben"}\n',
    "sft.jsonl": '{"prompt": "copy: Ada", "answer": "Ada"}\n{"prompt": [5, 7, 9], "answer": "Ben , Cal"}\n' * 3,
    "schema.json": json.dumps(SCHEMA),
    "own.grammar": files("dllm_sampler.guides.grammar").joinpath("examples/arithmetic.grammar").read_text(),
    "frequency.json": '{"num_token": 100, "p_baseline_dict": {"5": 3, "9": 20}}\n',
    "ck/generation_config.json": '{"eos_token_id": [1], "temperature": 0.5}\n',
    "conf/scheduler/own.yaml": "# Mine\n_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.7\n",
    "conf/task/own.yaml": "# Mine\n_target_: dllm_sampler.eval.tasks.mini.Mini\ncount: 2\nseed: 0\noperation: copy\n",
    "conf/suite/own.yaml": "# Mine\ncommon:\n  - task.count=1\n  - task.operation=copy\nsweeps:\n"
    '  - [scheduler=fixed, "scheduler.steps=2,4"]\n  - [scheduler=threshold]\n',
    "conf/tune/own.yaml": "# Mine\nname: best\ntrials: 1\nloss: 5.0\nmeasure: answer_tokens_per_forward\nseed: 0\n"
    "space:\n  scheduler:\n    threshold:\n      threshold: {low: 0.5, high: 0.9}\n  options:\n    block_length: [8]\n",
    "conf/train/own.yaml": (files("dllm_sampler.conf") / "train/sft.yaml").read_text(),
    "conf/experiment/mine.yaml": "# @package _global_\n# Mine\ndefaults:\n  - override /scheduler: factor\nseed: 6\n",
    "conf/experiment/tuned.yaml": "# @package _global_\n# Found by dllm-tune: 90 %\n"
    "defaults:\n  - override /cache: dual\n",
}

SAMPLE = ["copy: Ada", "model=ck", "max_new_tokens=4", "device=cpu"]
EVAL = ["task.operation=copy", "task.count=2", "max_new_tokens=8", "device=cpu", "oracle=false", "output=new"]
TRAIN = ["train=mini", "train.max_steps=1", "train.data.size=64", "train.data.batch_tokens=100", "train.use_cpu=true"]
TUNE = [*EVAL[:-1], "tune.trials=1", "output=new"]
TUNING = ["train.model=ck", "train.data=sft.jsonl", "train.max_steps=1", "train.held_out=1", "train.new_tokens=8"]
TUNING += ["train.output_dir=new", "train.use_cpu=true"]
FORM = ["json: name Ada", "max_new_tokens=16", "device=cpu"]
UNIFORM = ["scheduler=entropy_renoise", "blocks.length=null"]  # without masks
READS: list[tuple[str, list[str], str]] = [  # a command, its words, and a file that it reads
    *(("dllm-sample", SAMPLE, f"ck/{name}.json") for name in ("config", "tokenizer", "tokenizer_config")),
    *(("dllm-sample", ["ab", f"model=tiny-{name}", *SAMPLE[2:]], f"tiny-{name}/config.json") for name in tiny.EVERY),
    ("dllm-sample", ["ab", "model=tiny-diffusion-gemma", *SAMPLE[2:], *UNIFORM], "tiny-diffusion-gemma/config.json"),
    ("dllm-sample", SAMPLE, "ck/generation_config.json"),
    ("dllm-sample", SAMPLE, "ck/model.safetensors"),
    ("dllm-sample", ["ab", "model=tiny-llada2-moe", *SAMPLE[2:]], "tiny-llada2-moe/model.safetensors"),
    ("dllm-sample", ["ab", "model=tiny-llada", *SAMPLE[2:], f"target={TARGET}"], f"{TARGET}/config.json"),
    ("dllm-sample", [*SAMPLE, "chat=true"], "ck/tokenizer_config.json"),
    ("dllm-sample", [*SAMPLE, "scheduler=pc", "scheduler.frequency=frequency.json"], "frequency.json"),
    ("dllm-sample", ["Ada", "scheduler=learn2pd", "scheduler.filter=filter.safetensors"], "filter.safetensors"),
    ("dllm-sample", [*SAMPLE[1:], "prompts_file=prompts.jsonl"], "prompts.jsonl"),
    ("dllm-sample", [*SAMPLE[1:], "prompts_file=prompts.txt"], "prompts.txt"),
    ("dllm-sample", [*FORM, "guide=json_schema", "guide.json_schema.schema=schema.json"], "schema.json"),
    ("dllm-sample", [*FORM, "guide=grammar", "guide.grammar.grammar=own.grammar"], "own.grammar"),
    ("dllm-sample", [*SAMPLE, "scheduler=own"], "conf/scheduler/own.yaml"),
    ("dllm-sample", [*SAMPLE, "experiment=mine"], "conf/experiment/mine.yaml"),
    ("dllm-eval", ["task=jsonl", "task.file=task.jsonl", "max_new_tokens=4", "output=new"], "task.jsonl"),
    ("dllm-eval", [*EVAL[1:], "task=own"], "conf/task/own.yaml"),
    ("dllm-eval", ["suite=own", "max_new_tokens=8", "output=new"], "conf/suite/own.yaml"),
    ("dllm-report", ["runs", "--csv", "-"], "runs/one/run.json"),
    ("dllm-report", ["runs", "--csv", "-"], "runs/one/samples.jsonl"),
    ("dllm-tune", [*TUNE, "tune=own"], "conf/tune/own.yaml"),
    ("dllm-tune", TUNE, "conf/experiment/tuned.yaml"),
    ("dllm-train", ["train=own", *TUNING], "conf/train/own.yaml"),
    ("dllm-train", ["train=sft", *TUNING], "sft.jsonl"),
    (ENGINE, ["scheduler=own"], "conf/scheduler/own.yaml"),
]


def run(command: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process. Returns its exit status and what it printed on standard error."""
    err = io.StringIO()
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", io.StringIO()):
        try:
            status = import_module(MODULES[command]).main(list(words))
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
    return status, err.getvalue()


@functools.cache
def scene() -> TemporaryDirectory[str]:
    """Make a folder with what all commands read."""
    made = TemporaryDirectory(prefix="dllm-fuzz-")
    folder = Path(made.name) / "base"
    (folder / "ck").mkdir(parents=True)
    checkpoint.write(folder / "ck")
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    shutil.copy(str(files("dllm_sampler") / "models/mini/filter.safetensors"), folder / "filter.safetensors")
    return made


@functools.cache
def part(name: str) -> Path:
    """Make one of the folders that only some commands read: a checkpoint, or finished runs."""
    folder = Path(scene().name) / name
    if name.startswith("tiny-"):
        return tiny.write(name.removeprefix("tiny-"), folder)
    with chdir(scene().name), patch("time.perf_counter", return_value=0.0):
        assert run("dllm-eval", [*EVAL[:-1], "output=runs"])[0] == 0
        next(folder.glob("mini-*")).rename(folder / "one")
    return folder


@contextmanager
def copied(words: Sequence[str]) -> Iterator[Path]:
    """Work in a copy of what a command reads."""
    with TemporaryDirectory(prefix="dllm-fuzz-") as place:
        folder = Path(place) / "here"
        shutil.copytree(Path(scene().name) / "base", folder)
        for name in {word.rpartition("=")[2] for word in words}:
            if name == "runs" or name.startswith("tiny-"):
                shutil.copytree(part(name), folder / name)
        with chdir(folder):
            yield folder
