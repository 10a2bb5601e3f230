"""What the README says can be typed works, and prints what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler.cli.main import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("AR-FOLDER", "GSAI-ML")  # models that are not here


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
    assert ran >= 7 and printed == 1
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(block.replace("* 100", "* 4"), "README.md", "exec"), names)
    (said,) = re.findall(r"result.texts +# (\[.+?\])", block)
    assert repr(names["result"].texts) == said
    assert len(capsys.readouterr().out.splitlines()) > 12


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
