"""Runs that are killed, interrupted, out of space or disturbed: the same command completes what was begun."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dllm_sampler.cli.terminal import INTERRUPTED
from tests.fuzz import QUIET, scene

CPU = ["device=cpu", "max_new_tokens=12", "dtype=float64"]
TASK = [*CPU, "task.operation=copy", "output=out"]
SAMPLE = [*CPU, "prompts_file=many.txt", "model=ck", "samples=2", "temperature=0.7", "batch_size=3"]
RUNS: dict[str, tuple[str, list[str]]] = {  # each is over in about a second
    "sample": ("dllm-sample", [*SAMPLE, "output=out/o.jsonl", "resume=true"]),
    "eval": ("dllm-eval", [*TASK, "task.count=9", "batch_size=3"]),
    "workers": ("dllm-eval", [*TASK, "task.count=9", "batch_size=2", "workers=2", "oracle=false"]),
    "tune": ("dllm-tune", [*TASK, "task.count=4", "tune.trials=3", "tune.space={cache: {none: {}}}"]),
}
SECONDS, REST = 120.0, 20.0  # limits of one run, and of what a process needs to go away after it
TIMES = ("time", "times", "seconds", "peak_memory")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    err: str


class Running:
    """A command in a process of its own.

    Args:
        most: bytes that a file may have.
        jump: seed of a clock that jumps.
    """

    def __init__(self, what: str, folder: Path, most: int | None = None, jump: int | None = None) -> None:
        processes = get_context("forkserver")  # it imports once for all
        processes.set_forkserver_preload([__name__, *scene.MODULES.values(), "dllm_sampler.eval.launch"])
        self.line, other = processes.Pipe()
        self.process: BaseProcess = processes.Process(target=work, args=(what, folder, most, jump, other))
        self.process.start()
        other.close()

    def end(self) -> Ended:
        """Wait for its end."""
        said = None
        with suppress(EOFError, OSError):  # a killed one says nothing
            assert self.line.poll(SECONDS), "it does not end"
            said = Ended(*self.line.recv())
        self.process.join(REST)
        if self.process.is_alive():  # it waits for workers that are gone
            self.process.kill()
            self.process.join()
        return said or Ended(self.process.exitcode or 0, "")


def work(what: str, folder: Path, most: int | None, jump: int | None, line: Connection) -> None:
    """Run the command, in its process."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    if jump is not None:
        chance, clock = Random(jump), time.time
        time.time = lambda: clock() + chance.choice([-1e6, 0.0, 1e6])
    try:
        line.send(scene.run(*RUNS[what]))
    except KeyboardInterrupt:
        line.send((INTERRUPTED, "before or after the command: the same command goes on"))
    except BaseException as error:
        line.send((1, f"Traceback (most recent call last): {type(error).__name__}: {error}"))
    line.close()


def prepared(folder: Path) -> Path:
    """Make a working directory for a run."""
    (folder / "ck").symlink_to(Path(scene.scene().name) / "base/ck")
    names = ("Ada", "Ben", "Cal", "Dan", "Eve") * 6
    (folder / "many.txt").write_text("".join(f"copy: {name}\n" for name in names))
    (folder / "out").mkdir()
    return folder


@functools.cache
def undisturbed(what: str) -> tuple[dict[str, Any], list[int]]:
    """Return what a run leaves that nothing disturbs, and the sizes of its files."""
    with TemporaryDirectory(prefix="dllm-fuzz-") as place:
        folder = prepared(Path(place))
        ended = Running(what, folder).end()
        assert ended.status == 0, ended
        return result(what, folder), sizes(folder)


def sizes(folder: Path) -> list[int]:
    """Return the bytes of each file that a run has written so far."""
    found = [0]
    for file in (folder / "out").rglob("*"):
        with suppress(OSError):
            found.append(file.stat().st_size)
    return found


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without times. A line that is cut off at the end does not count."""
    whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in whole]


def result(what: str, folder: Path) -> dict[str, Any]:
    """Return all that a finished run leaves, without times."""
    out = folder / "out"
    if what == "sample":
        return {"samples": records(out / "o.jsonl")}
    left: dict[str, Any] = {file.parent.name: records(file) for file in sorted(out.glob("*/samples.jsonl"))}
    left["parts"] = [file.name for file in out.glob("*/part-*")]
    if what == "tune":
        left["winner"] = (folder / "conf/experiment/tuned.yaml").read_text()
    else:
        about = [json.loads(file.read_text()) for file in sorted(out.glob("*/run.json"))]
        left["about"] = [{**one, "environments": len(one["environments"])} for one in about]
    return left


def disturb(what: str, folder: Path, how: str, share: float) -> None:
    """Run a command, and disturb it.

    Args:
        how: a signal, a lost worker, a full disk, two runs at once, or a clock that jumps.
        share: of the bytes of an undisturbed run, after which the signal comes or the disk is full.
    """
    whole, files = undisturbed(what)
    most = int(share * max(files)) + 1 if how == "full" else None
    jump = int(share * 1000) if how == "clock" else None
    running = [Running(what, folder, most, jump) for _ in range(2 if how == "two" else 1)]
    pid = running[0].process.pid
    assert pid is not None
    if how in (*SIGNALS, "worker"):
        deadline = time.monotonic() + SECONDS
        while running[0].process.is_alive() and sum(sizes(folder)) < share * sum(files) and time.monotonic() < deadline:
            time.sleep(0.001)
        workers = children(pid) if how == "worker" else []
        with suppress(ProcessLookupError):
            os.kill(workers[len(workers) // 2] if workers else pid, SIGNALS.get(how, signal.SIGKILL))
    for one in running:
        ended = one.end()
        assert how == "worker" or "Traceback" not in ended.err, ended  # joblib shows where a lost worker was
        assert ended.status != INTERRUPTED or " command " in ended.err, "Ctrl-C does not say how to go on"
        assert how != "clock" or ended.status == 0, ended
        assert how not in ("full", "clock") or ended.status != 0 or result(what, folder) == whole
    assert not list(outlive(folder)), "processes outlive the command"


def outlive(folder: Path) -> Iterator[str]:
    """Yield the command lines of the processes in a folder that are still there after `REST` seconds."""
    deadline = time.monotonic() + REST
    while found := [one for one in Path("/proc").glob("[0-9]*") if is_in(one, folder)]:
        if time.monotonic() > deadline:
            for one in found:
                with suppress(OSError):
                    yield (one / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
                    os.kill(int(one.name), signal.SIGKILL)
            return
        time.sleep(0.05)


def is_in(process: Path, folder: Path) -> bool:
    """Return True if the process works in the folder."""
    with suppress(OSError):
        return os.path.realpath(process / "cwd") == os.path.realpath(folder)
    return False


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def troubles(what: str) -> st.SearchStrategy[list[tuple[str, float]]]:
    """One to three disturbances of a run."""
    hows = [*SIGNALS, "full", "two", "clock", *(["worker"] if what == "workers" else [])]
    return st.lists(st.tuples(st.sampled_from(hows), st.floats(0, 1)), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("what", RUNS)
def test_a_disturbed_run_is_completed(what: str) -> None:
    """The same command then leaves what an undisturbed run leaves: nothing is lost, nothing is there twice."""

    @settings(QUIET, max_examples=settings().max_examples // 10, phases=[Phase.reuse, Phase.generate])
    @given(hows=troubles(what))
    def check(hows: list[tuple[str, float]]) -> None:
        with TemporaryDirectory(prefix="dllm-fuzz-", ignore_cleanup_errors=True) as place:
            folder = prepared(Path(place))
            for how, share in hows:
                disturb(what, folder, how, share)
            ended = Running(what, folder).end()
            assert ended.status == 0, ended
            assert result(what, folder) == undisturbed(what)[0]

    check()
