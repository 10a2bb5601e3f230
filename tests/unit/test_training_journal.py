"""The log of a training run, and the trackers."""

from __future__ import annotations

import json
import math
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dllm_sampler.errors import NotWrittenError
from dllm_sampler.training import journal
from dllm_sampler.training.journal import Journal
from tests.disks import full_after
from tests.refusals import refused


class Trackio(ModuleType):
    """What the journal uses of trackio."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **settings: Any) -> Trackio:
        self.calls.append(("init", settings))
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.calls.append((step, figures))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_goes_on_behind_the_saved_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Journal(path, 0)
    for step in range(4):
        log.note(step, {"loss": math.pi / (step + 1), "count": step})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert journal.read(path)[1] == {"step": 1, "loss": 1.5707963, "count": 1}
    Journal(path, 2).note(3, {"loss": 7.0})
    assert [line["step"] for line in journal.read(path)] == [0, 1, 2, 3]
    assert journal.read(path)[-1]["loss"] == 7
    Journal(path, 1, active=False).note(9, {})
    assert len(journal.read(path)) == 4, "only one process writes"
    Journal(path, 0)
    assert not path.read_text(), "a new run has a new log"


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Journal(tmp_path / "log.jsonl", 0, "tensorboard")
    log.note(1, {"loss": 0.5})
    log.note(2, {"loss": 0.25})
    log.close()
    log = Journal(tmp_path / "log.jsonl", 1, "tensorboard")
    log.note(2, {"loss": 0.125})
    log.close()
    found = EventAccumulator(str(tmp_path / "log.tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 0.5), (2, 0.125)]


def test_a_disk_that_is_too_full_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that standard output cannot be written, behind a traceback of tensorboard's thread."""
    pytest.importorskip("tensorboard")
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    journal._hush.cache_clear()
    log = Journal(tmp_path / "log.jsonl", 0, "tensorboard")

    def notes() -> None:
        for step in range(5):
            log.note(step, {"a": 1, "b": 2})

    with full_after(200), pytest.raises(NotWrittenError, match=r"log\.tensorboard cannot be written: File too large"):
        notes()
    assert 0 < len(journal.read(tmp_path / "log.jsonl")) < 5 and told == []
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert len(told) == 1, "others are told"
    journal._hush.cache_clear()


def test_trackio_gets_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    journal.check("trackio")
    log = Journal(tmp_path / "log.jsonl", 0, "trackio", {"betas": (0.9, 0.99)})
    log.note(1, {"loss": 0.5})
    log.close()
    about = {"project": tmp_path.parent.name, "name": tmp_path.name, "config": {"betas": [0.9, 0.99]}}
    assert fake.calls == [("init", {**about, "resume": "allow"}), (1, {"loss": 0.5}), ("finish",)]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": 0.5}


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    journal.check(None)
    with refused("choice-unknown: train.tracker, 'trackyo', 'trackio'"):
        journal.check("trackyo")
    monkeypatch.setattr(journal, "find_spec", lambda _: None)
    with refused("package-missing: train.tracker=trackio"):
        journal.check("trackio")


@pytest.mark.parametrize("line", ["null", "[]", '{"loss": 1}', '{"step": "1"}', "[" * 100_000, '{"ste'])
def test_a_line_that_is_none_of_a_log_ends_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode() + b"\n\xff\n")
    assert journal.read(path) == [{"step": 1}]
    journal.Journal(path, 1).close()
    assert path.read_text() == '{"step": 1}\n'
