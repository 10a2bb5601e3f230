"""Every block of code of the README and of docs/, run in the order of its page.

The files of a page are written to an empty folder first. A model of the hub is a tiny checkpoint of its family, and a
long run is made short: the tables below say what is replaced, and what is left out.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer

import dllm_sampler
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:`(?P<file>[\w/.-]+)`:\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in ("README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")))
         if "```" in (ROOT / page).read_text(encoding="utf-8")]  # fmt: skip
TINY = {  # the family of each model that the pages name
    "llada-8b": "llada", "llada-8b-base": "llada", "dream-7b": "dream", "sdar-8b": "sdar",
    "nemotron-labs-diffusion-8b": "nemotron-labs-diffusion",
}  # fmt: skip
TARGETS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B-Instruct")  # left-to-right models that the pages name
FILES = {  # what the text around the blocks assumes
    "README.md": {
        "conf/scheduler/mine.yaml": "# Mine.\n_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.6\n"
    },
    "docs/training.md": {
        "my_module.py": "def reward(completions, **_):\n    return [len(text) for text in completions]\n"
    },
    "docs/drafting.md": {"mine.jsonl": '{"prompt": "Ada?", "completion": "Ben."}\n'},
}
SHORTER = [  # what a command contains, and what is typed after it, in place of its own settings
    ("scheduler=apd", "max_new_tokens=16"),
    (" target=my-llama", "max_new_tokens=16"),
    ("dllm-eval suite=compare", "task.operation=sort task.count=1 scheduler=fixed,klass"),
    ("dllm-eval task=markov", "task.count=8 scheduler=fixed,klass"),
    ("dllm-eval task=mini", "task.count=2"),
    ("dllm-eval scheduler=", "task.count=2"),
    ("dllm-eval task.operation", "task.count=2"),
    ("dllm-eval task=unconditional", "task.count=1 task.begin=A task.length=4"),
    ("dllm-tune", "task.count=2 tune.trials=2"),
    ("dllm-train", "train.max_steps=1 train.use_cpu=true"),
]
OFFLINE = ("gsm8k", "gpt2-large")  # data and models of the hub without a small one here: the command must say so
LEFT_OUT = {
    "pip install": "needs a network",
    "pytest": "these are the tests",
    "sglang serve": "a server with a GPU; its settings are tested in tests/integrations",
    "accelerate launch": "two GPUs; two processes are tested in test_training_processes.py",
    "python examples/antibody.py": "a checkpoint of the hub; test_antibody.py runs it on a tiny one",
    "python benchmarks/campaign.py --minutes": "a GPU",
    "python -m dllm_sampler.eval.protocols --install": "needs a network",
    "dllm-train train=sft train.model=FOLDER": "a folder of the reader's; the page on training has the same command",
    "for seed": "hours of training, in batches of eight seeds",
    "python -m tests.tables.learning_curves": "reads their runs; test_training_figures.py has small ones",
    "python -m tests.tables.distilled": "reads their runs",
    "python -m tests.conformance": "three minutes; tests/conformance replays each run",
}


class Block(NamedTuple):
    """A block of a page: the line where it starts, its language, its text and the file that it is."""

    line: int
    language: str
    text: str
    file: str | None


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield Block(text.count("\n", 0, found.start("text")), found["language"], found["text"], found["file"])


def commands(text: str) -> Iterator[str]:
    """Each command of a block: a quotation, a backslash or a loop continues on the next line."""
    begun = ""
    for line in text.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        whole = subprocess.run(["bash", "-n"], input=begun, text=True, capture_output=True).returncode == 0
        if whole and begun.strip() and not begun.endswith("\\"):
            yield begun
        begun = "" if whole and not begun.endswith("\\") else begun
    assert not begun, begun


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny checkpoint of each name of `TINY`, and `target`, a left-to-right model beside them."""
    folder = tmp_path_factory.mktemp("models")
    for name, family in TINY.items():
        tiny.write(family, folder / name)
    tiny.target_of(folder / "dream-7b")
    return folder


@pytest.fixture
def folder(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a reader works in: of the checkout, it has what the pages name."""
    for name in ("benchmarks", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "models").symlink_to(models)
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "DLLM_SAMPLER_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def small(text: str) -> str:
    """The text with tiny checkpoints for models of the hub, on a CPU."""
    text = text.replace("device=cuda", "device=cpu")
    for name in TARGETS:
        text = text.replace(name, "models/target")
    for name in sorted(TINY, key=len, reverse=True):
        here = f"model={name} model.path=models/{name} model.mask_id=null"
        text = re.sub(rf"(?<= )model={name}(?![\w-])", here, text)
        text = re.sub(rf"(train\.model=|['\"]){name}(?![\w-])", rf"\1models/{name}", text)
    return text


def run_command(command: str, where: str) -> None:
    """Run a command as it is typed, but for `SHORTER`. It ends with exit status 0 and prints what its comment says."""
    words = small(command)
    more = next((more for part, more in SHORTER if part in words), None)
    if more:
        for key in re.findall(r"[\w.]+(?==)", more):
            words = re.sub(rf" {re.escape(key)}=('[^']*'|\S+)", "", words)
        program, _, rest = words.partition(" ")
        words = f"{program} {more} {rest}"
    done = subprocess.run(["bash", "-euc", words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if any(name in command for name in OFFLINE):
        assert done.returncode == 2 and "where there is a network" in done.stderr, f"{where}: {words}\n{done.stderr}"
        return
    assert done.returncode == 0, f"{where}: {words}\n{done.stdout}\n{done.stderr}"
    said = re.search(r"  # ([{\[A-Z].*)\Z", command)
    if said:
        assert done.stdout.splitlines()[0] == said[1], f"{where}: {words}"


def literal(comment: str) -> Any:
    """The longest beginning of a comment that is a Python value. Raises `LookupError` if there is none."""
    for end in range(len(comment.rstrip()), 0, -1):
        try:
            return ast.literal_eval(comment[:end].rstrip(", "))
        except (SyntaxError, ValueError):
            continue
    raise LookupError(comment)


def run_python(text: str, names: dict[str, Any], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block. An expression has, or prints, the value with which the comment beside it begins."""
    text = small(text)
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        source = ast.unparse(statement)
        if not isinstance(statement, ast.Expr):
            exec(compile(source, where, "exec"), names)
            continue
        capsys.readouterr()
        value = eval(compile(source, where, "eval"), names)
        comment = lines[(statement.end_lineno or 1) - 1][statement.end_col_offset :].partition("# ")[2]
        try:
            said = literal(comment)
        except LookupError:
            continue
        printed = capsys.readouterr().out
        assert (ast.literal_eval(printed) if printed else value) == said, f"{where}: {source}"


def given(page: str) -> dict[str, Any]:
    """Write what the page assumes, and return the names that its Python assumes."""
    for name, text in FILES.get(page, {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    mini = Path(dllm_sampler.__file__).parent / "models" / "mini"
    match page:
        case "docs/your_own.md":
            shutil.copytree(mini, "checkpoints/last")
        case "docs/drafting.md":
            tiny.target_of(shutil.copytree(mini, Path("mini"))).rename("my-llama")
        case "docs/engines.md":
            source = tiny.write("llada2-moe", Path("llada2"))
            return {"model": nn.Identity(), "tokenizer": AutoTokenizer.from_pretrained(source)}
        case "docs/models_and_methods.md":
            source = tiny.write("bert", Path("bert"))
            model, tokenizer = AutoModelForMaskedLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
            return {"model": model, "tokenizer": tokenizer, "logits_fn": lambda ids, mask: model(ids, mask).logits}
    return {}


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = given(page)
    for block in blocks(page):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
    for block in blocks(page):
        where = f"{page}:{block.line}"
        if block.file is None and block.language == "python":
            run_python(block.text, names, where, capsys)
        for command in commands(block.text) if block.language == "bash" else ():
            if not any(command.startswith(beginning) for beginning in LEFT_OUT):
                run_command(command, where)
