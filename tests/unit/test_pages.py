"""Commands and code of the README and of pages in docs/, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dllm_sampler
from dllm_sampler.check.__main__ import main as check
from dllm_sampler.cli.main import main
from dllm_sampler.cli.main import main as sample
from dllm_sampler.eval.command import main as evaluate

# What the README says can be typed works, and prints what it says


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("llada-8b",)  # models that are not here


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.+?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Each command of the README, with what its comment says; a quotation may run over lines."""
    found, begun = [], ""
    for line in "\n".join(blocks("bash")).splitlines():
        begun = f"{begun}\n{line}" if begun else line
        try:
            shlex.split(begun, comments=True)
        except ValueError:  # a quotation that is not closed
            continue
        found.append(begun.rpartition("&& ")[2])
        begun = ""
    return found


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    ran = printed = 0
    for command in commands():
        words = shlex.split(command, comments=True)
        if not words:
            continue
        if words[0] == "printf":
            subprocess.run(["bash", "-c", command], check=True)
        if words[0] != "dllm-sample" or any(name in command for name in ELSEWHERE):
            continue
        assert main([*words[1:], "device=cpu"]) == 0, command
        out = capsys.readouterr().out
        ran += 1
        if said := re.search(r"  # ([{\[].+)\Z", command):
            assert out == said[1] + "\n"
            printed += 1
    assert ran >= 6 and printed == 1
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(block.replace("* 100", "* 4"), "README.md", "exec"), names)
    (said,) = re.findall(r"result.texts +# (\[.+?\])", block)
    assert repr(names["result"].texts) == said
    assert len(capsys.readouterr().out.splitlines()) == 12


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


# Pages whose code shows its results


@pytest.mark.parametrize("page", ["infilling", "grammars"])
def test_results_in_python(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    shown = 0
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names: dict[str, Any] = {}
        for line in block.splitlines():
            code, _, said = line.partition("  # ")
            try:
                expression = compile(code.strip(), f"{page}.md", "eval")
            except SyntaxError:  # a statement
                exec(compile(code, f"{page}.md", "exec"), names)
                continue
            assert said.strip().startswith(repr(eval(expression, names))), line
            shown += 1
    assert shown >= 5


def test_results_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "infilling.md").read_text(encoding="utf-8")
    lines = re.findall(r"^dllm-sample (\".*?)  +# (.+)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line, said in lines:
        assert main([*shlex.split(line), "device=cpu"]) == 0
        assert capsys.readouterr().out == said + "\n", line


# docs/your_own.md, walked through in an empty directory: its files are written there, its commands run in order


PAGE = (Path(__file__).parents[2] / "docs" / "your_own.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`([\w/.-]+)`:\n\n```(?:python|yaml|json)\n(.*?)```", PAGE, re.S))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, then the page's files, and a checkpoint where the page has one."""
    monkeypatch.chdir(tmp_path)
    for module in ("rule", "nearby", "penalty"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copytree(Path(dllm_sampler.__file__).parent / "models" / "mini", tmp_path / "checkpoints" / "last")
    return tmp_path


def test_the_page_has_its_files() -> None:
    assert set(FILES) == {
        *("rule.py", "nearby.py", "penalty.py", "prompts.jsonl"),
        *(f"conf/{name}/mine.yaml" for name in ("scheduler", "cache", "guide")),
        *(f"conf/{name}.yaml" for name in ("scheduler/bold", "experiment/quick", "model/my-model")),
    }


@pytest.mark.slow
def test_every_command_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) >= 15
    for line in COMMANDS:
        command, *words = shlex.split(line.removeprefix("python -m "), comments=True)
        assert {"dllm-sample": sample, "dllm-eval": evaluate, "dllm_sampler.check": check}[command](words) == 0, line
        out = capsys.readouterr().out
        expected = re.search(r"  # (.+)", line)
        assert expected is None or out.splitlines()[0] == expected[1], line
        if "--help" in words or "--info" in words:
            assert "[yours: conf/" in " ".join(out.split()), line
    runs = [json.loads(file.read_text()) for file in folder.glob("runs/*/run.json")]
    assert {run["config"]["scheduler"]["name"] for run in runs} == {"mine", "threshold"}
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == ["Ada, Ben", "Cal, Ben, Ada"]


@pytest.mark.slow
def test_the_installed_command(folder: Path) -> None:
    """All of it at once, in a process of its own that has not the directory on its path."""
    command = Path(sys.executable).with_name("dllm-sample")
    words = ["scheduler=mine", "model=my-model", "prompts_file=prompts.jsonl", "device=cpu"]
    (folder / "json.py").write_text("raise SystemExit('imported from the working directory')\n")
    done = subprocess.run([command, *words], capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "Ada, Ben\nCal, Ben, Ada\n"), done.stderr
