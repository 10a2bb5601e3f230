"""The fuzz of runs that are killed: what it checks afterwards, and each disturbance once."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import product
from pathlib import Path

import pytest

from dllm_sampler.eval.fuzz import kills, left, patience
from dllm_sampler.eval.fuzz.harness import Outcome, guarded


def test_lost_and_doubled_records_are_seen(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = tmp_path / "out/o.jsonl"
    whole = [json.dumps({"index": at, "time": at / 7}) + "\n" for at in range(4)]
    file.write_text("".join(whole))
    result = left.result("sample", tmp_path)
    assert left.unlike("sample", tmp_path, result) == left.torn("sample", tmp_path, result) == ""
    file.write_text("".join(whole).replace("0.", "1."))
    assert left.unlike("sample", tmp_path, result) == "", "times may differ"
    file.write_text("".join(whole[:3]))
    assert "3 of 4" in left.unlike("sample", tmp_path, result) and left.torn("sample", tmp_path, result) == ""
    file.write_text("".join([*whole, whole[1]]))
    assert "twice" in left.torn("sample", tmp_path, result) and left.unlike("sample", tmp_path, result)
    file.write_text(whole[0] + '{"ind' + whole[1])
    assert "broken line" in left.torn("sample", tmp_path, result)


def test_processes_that_are_left_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "REST", 0.1)
    monkeypatch.setattr(patience, "LOOK", 0.1)
    assert kills.outlived(tmp_path) == []
    process = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    assert kills.outlived(tmp_path) == ["sleep 60 "]
    assert process.wait() == -signal.SIGKILL


DISTURBED = [*product(["sample", "eval", "train", "sft", "tune"], ["kill", "int", "full", "two", "clock"])]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), [*DISTURBED, *product(["workers"], ["kill", "term", "int", "worker"])])
def test_a_disturbed_run_is_completed(what: str, how: str) -> None:
    case = {"what": what, "troubles": [{"how": how, "share": 0.5, "delay": 0}], "seed": 1}
    assert guarded(kills.FUZZ.check, case) == Outcome("passed", f"{what} after {how}")
