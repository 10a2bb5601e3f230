"""Published protocols: recorded prompts and grades of the authors' harnesses, and rules that decide figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.eval.protocols import grading, packages, programs, prompts, spec
from dllm_sampler.eval.protocols.__main__ import main
from dllm_sampler.eval.protocols.replay import replay
from dllm_sampler.eval.protocols.sanitize import sanitize
from tests.refusals import refused

RECORDED = Path(__file__).parent / "data" / "published"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDED / name).read_text(encoding="utf-8").splitlines()]


def without_pinned(tmp_path: Path) -> Path:
    """A folder of recordings that need no package besides lm-evaluation-harness, a part of the programs among them."""
    for folder, rows in (("prompts", lines("prompts/recorded.jsonl")), ("grading", lines("grading/recorded.jsonl"))):
        (tmp_path / folder).mkdir()
        kept = [row for row in rows if "opencompass" not in row["protocol"]]
        if folder == "grading":
            kept = [row for number, row in enumerate(kept) if row["task"] == "gsm8k" or number % 5 == 0]
        (tmp_path / folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copy(RECORDED / "prompts" / "gsm8k_train.json", tmp_path / "prompts")
    return tmp_path


def test_prompts_and_grades_are_those_of_the_authors_harnesses(tmp_path):
    outcomes = list(replay(without_pinned(tmp_path)))
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert len(outcomes) > 150


def test_a_line_that_differs_fails(tmp_path):
    folder = without_pinned(tmp_path)
    (folder / "grading" / "some.jsonl").unlink()
    rows = [json.loads(line) for line in (folder / "prompts" / "some.jsonl").read_text().splitlines()][:4]
    rows[0]["until"], rows[1]["request_sha256"] = ["x"], "0" * 64
    rows[2]["doc"] = {**rows[2]["doc"], "question": "Another one?", "problem": "Another one?"}
    (folder / "prompts" / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [bool(outcome.wrong) for outcome in replay(folder)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (3, "prompts/a.jsonl line 1 is not a JSON object"),
        ({"variant": "x"}, "prompts/a.jsonl line 1: no protocol has fast-dllm-llada/x with task"),
    ],
)
def test_a_recording_that_is_invalid_is_named(line, message, tmp_path, capsys):
    row = next(row for row in lines("prompts/recorded.jsonl") if row["protocol"] == "fast-dllm-llada")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/a.jsonl").write_text(json.dumps({**row, **line} if isinstance(line, dict) else line))
    assert main(["--replay", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_replay_command(monkeypatch, capsys):
    try:
        packages.install()
    except UserError as error:
        if error.code != "package-missing":
            raise
        pytest.skip(str(error))
    assert main(["--replay", str(RECORDED)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "462 passed, 0 failed"


def test_a_missing_package_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(packages.FOLDER, str(tmp_path))
    with refused(f"package-missing: {packages.INSTALL}"):
        grading.needed(spec.load("fast-dllm").cells["fast-dllm-llada/instruct", "minerva_math"])


@pytest.mark.parametrize("name", spec.names())
def test_a_protocol_states_everything(name):
    protocol = spec.load(name)
    for cell in protocol.cells.values():
        assert cell.lm_eval or cell.opencompass
        assert cell.variant in protocol.models
        assert protocol.methods[cell.variant]
    assert config.entry(spec.GROUP, name).settings["evidence"]


def test_a_wrong_value_in_a_protocol_is_named():
    with refused("choice-unknown: chat='loud'"):
        spec._cell("mine", "a/b", "gsm8k", {"chat": "loud", "data": {"path": "x"}})


def test_sanitize():
    helper, f = "import math\ndef helper(x):\n    return math.sqrt(x)", "def f(x):\n    return helper(x)"
    text = f"Sure:\n{helper}\n{f}\ndef g(x):\n\tpass\nprint(f(4))\nDone!"
    assert sanitize(text, "f") == f"{helper}\n{f}"
    assert "def g" not in sanitize(text)
    assert sanitize("no code at all, sorry") == ""


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("x = bytearray(8 * 2**30)", False),
        ("input()", False),
        ("while True: pass", False),
    ],
)
def test_programs(program, right):
    assert programs.passes(program, 0.3) is right


def test_a_program_without_limits_does_not_run(monkeypatch, tmp_path):
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    monkeypatch.setattr(programs, "MEMORY", "much")
    with refused("limits-unsupported: task.run_code"):
        programs.passes(program)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not programs.is_isolated(), reason="unshare -rn does not work here")
def test_programs_have_no_network():
    call = "socket.create_connection(('1.1.1.1', 53), 1)"
    assert programs.passes(f"import socket\ntry:\n    {call}\nexcept OSError as e:\n    assert e.errno == 101")


def test_an_answer_in_a_fence_fails_mbpp_of_fast_dllm_and_passes_that_of_d3llm():
    fast, d3llm = (spec.load(name).cells for name in ("fast-dllm", "d3llm"))
    document = {
        "text": "Add.",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(1, 1) == 2"],
    }
    text = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\n"
    for cell, right in ((fast["fast-dllm-llada/instruct", "mbpp"], 0), (d3llm["d3llm-llada/all", "mbpp"], 1)):
        assert grading.grade(cell, document, text).metrics[cell.published] == right
        assert "[BEGIN]" in next(prompts.build(cell, [document], [], "data")).text
