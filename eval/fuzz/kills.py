"""Commands that are killed, interrupted, out of space or disturbed: the same command completes what was begun."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from traceback import extract_tb
from typing import Any, ClassVar

from dllm_sampler.cli.ending import INTERRUPTED
from dllm_sampler.eval.fuzz import left, scene
from dllm_sampler.eval.fuzz.harness import Case, Outcome
from dllm_sampler.eval.fuzz.patience import Patience, patient

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
MAIN = {  # words of each kind of run; a small one is over in about a second
    "sample": ["prompts_file=many.txt", "model=ck", "max_new_tokens=12", "batch_size=3", "output=out/o.jsonl"],
    "eval": ["scheduler=threshold,wino", "task.operation=copy", "task.count=9", "batch_size=3", "dtype=float64"],
    "workers": ["scheduler=threshold", "task.operation=copy", "task.count=9", "batch_size=2", "dtype=float64"],
    "train": [
        "train=mini",
        "train.steps=12",
        f"train.checkpoint_every={left.EVERY}",
        "train.data.size=64",
        "train.output=out/t",
    ],
    "sft": [
        "train=sft",
        "train.model=ck",
        "train.data=sft.jsonl",
        "train.steps=12",
        f"train.checkpoint_every={left.EVERY}",
        "train.held_out=1",
        "train.new_tokens=8",
        "train.output=out/t",
        "train.device=cpu",
    ],
    "tune": ["task.operation=copy", "task.count=4", "tune.trials=3", "tune.space={cache: {none: {}}}", "output=out"],
}
MAIN["sample"] += ["device=cpu", "dtype=float64", "samples=2", "temperature=0.7"]
MAIN["eval"] += ["output=out", "device=cpu", "max_new_tokens=12"]
MAIN["workers"] += ["output=out", "device=cpu", "max_new_tokens=12", "workers=2", "oracle=false"]
MAIN["train"] += ["train.data.batch_tokens=100", "train.device=cpu", "train.model.num_layers=1"]
MAIN["tune"] += ["device=cpu", "max_new_tokens=12", "dtype=float64"]
# What each kind runs; the others: dllm-eval.
COMMANDS = {"sample": "dllm-sample", "train": "dllm-train", "sft": "dllm-train", "tune": "dllm-tune"}
PROMPTS = "".join(f"copy: {name}\n" for name in ("Ada", "Ben", "Cal", "Dan", "Eve") * 6)
SECONDS = 60.0  # that one run may take
REST = 10.0  # seconds that a process has to go away after its command has ended


@dataclass
class Running:
    """A command that runs in a process of its own, and tells at its end how that was."""

    process: BaseProcess
    line: Connection

    @staticmethod
    def start(folder: Path, words: list[str], command: str, trouble: dict[str, Any]) -> Running:
        """Start it in `folder`; `trouble`: `bytes` that a file may have, or `jump`, a seed of a clock that jumps."""
        processes = get_context("forkserver")  # imports once for all
        processes.set_forkserver_preload([__name__, *scene.MODULES.values(), "dllm_sampler.eval.launch"])
        line, other = processes.Pipe()
        process = processes.Process(target=alone, args=(str(folder), words, command, trouble, other))
        process.start()
        other.close()
        return Running(process, line)

    def end(self) -> scene.Ended | None:
        """How it ended, by itself or by a signal; None: not yet."""
        said = None
        with suppress(EOFError, OSError):
            if not Patience(os.getsid(0)).poll(self.line, SECONDS):
                return None
            said = scene.Ended(*self.line.recv())
        self.process.join(patient(REST))
        if self.process.is_alive():  # it waits for workers that are gone
            self.process.kill()
            self.process.join()
        return said or scene.Ended(self.process.exitcode or 0, "", "")


def alone(folder: str, words: list[str], command: str, trouble: dict[str, Any], line: Connection) -> None:
    """The command, in its process."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "bytes" in trouble:
        resource.setrlimit(resource.RLIMIT_FSIZE, (trouble["bytes"], resource.RLIM_INFINITY))
    if "jump" in trouble:
        chance, clock = Random(trouble["jump"]), time.time
        time.time = lambda: clock() + chance.choice([-1e6, 0.0, 1e6])
    import torch

    torch.set_num_threads(1)
    try:
        ended = scene.called(command, words)
        line.send((ended.status, ended.out, ended.err))
    except KeyboardInterrupt as stop:
        where = extract_tb(stop.__traceback__)[-1].name
        around = where in ("alone", "called", "main", "ending")  # a command hears it from `ending` on, until that ends
        line.send((1, "", "Ctrl-C before or after the command" if around else f"Traceback: Ctrl-C in {where}"))
    except BaseException as error:
        line.send((1, "", f"Traceback (most recent call last): {type(error).__name__}: {error}"))
    line.close()


class Kills:
    """Runs that are cut off, again and again, and then completed."""

    limit: ClassVar[float] = 4 * SECONDS

    def draw(self, random: Random) -> Case:
        """A run and what happens to it."""
        what = random.choices([*MAIN], [4, 5, 2, 3, 3, 4])[0]
        hows = ["kill"] * 5 + ["term", "int", "int", "full", "full", "two", "clock"]
        hows += ["worker"] * 6 if what == "workers" else []
        troubles = [
            {"how": random.choice(hows), "share": random.random(), "delay": random.choice([0, 0, random.random() / 20])}
            for _ in range(random.choice([1, 1, 2, 3]))
        ]
        return {"what": what, "troubles": troubles, "seed": random.randrange(2**32)}

    def check(self, case: Case) -> Outcome:
        """Disturb a run, run the same command until it ends, and compare the result with that of an undisturbed run."""
        what, (whole, size) = case["what"], undisturbed(case["what"])
        with TemporaryDirectory(prefix="dllm-fuzz-", ignore_cleanup_errors=True) as name:
            folder = place(Path(name))
            for trouble in case["troubles"]:
                if wrong := self._trouble(case, trouble, folder, size):
                    return wrong
                if wrong := left.torn(what, folder, whole):
                    return Outcome("loss", f"after {trouble['how']}: {wrong}", f"{what} {trouble['how']}")
            ended = None
            if not left.finished(what, folder):
                ended = started(what, folder, {}).end()
                if ended is None:
                    return Outcome("hang", f"{what} does not end after {_names(case)}", f"{what} hangs")
                if ended.status != 0:
                    about = f"{what} after {_names(case)} ends with {ended.status}: {ended.err.strip()[-300:]}"
                    return Outcome("traceback" if "Traceback" in ended.err else "loss", about, f"{what} goes not on")
            if wrong := left.unlike(what, folder, whole):
                return Outcome("loss", f"{what} after {_names(case)}: {wrong}", f"{what} {wrong.partition(':')[0]}")
        return Outcome("passed", f"{what} after {case['troubles'][0]['how']}")

    def _trouble(self, case: Case, trouble: dict[str, Any], folder: Path, size: int) -> Outcome | None:
        """One disturbed run; the failure that shows at once, if any."""
        what, how = case["what"], trouble["how"]
        given: dict[str, Any] = {}
        if how == "full":
            given["bytes"] = int(trouble["share"] * max(left.sizes(undisturbed_folder(what)))) + 1
        elif how == "clock":
            given["jump"] = case["seed"]
        running = [started(what, folder, given) for _ in range(2 if how == "two" else 1)]
        if how in (*SIGNALS, "worker"):
            wait(running[0], folder, trouble["share"] * size)
            time.sleep(trouble["delay"])
            _signal(running[0], how)
        for one in running:
            ended = one.end()
            if ended is None:
                one.process.kill()
                return Outcome("hang", f"{what} hangs under {how}", f"{what} {how}")
            if "Traceback" in ended.err and how != "worker":  # joblib shows where a lost worker was
                return Outcome("traceback", f"{what} under {how}: {ended.err.strip()[-400:]}", f"{what} {how}")
            if how == "int" and ended.status == INTERRUPTED and "the same command" not in ended.err:
                about = f"{what}: Ctrl-C does not say how to go on: {ended.err.strip()[-300:]}"
                return Outcome("wrong", about, f"{what} says nothing")
            if (
                how in ("full", "clock")
                and ended.status == 0
                and (wrong := left.unlike(what, folder, undisturbed(what)[0]))
            ):
                return Outcome("loss", f"{what} under {how} ends with 0: {wrong}", f"{what} {how} ends with 0")
            if how == "clock" and ended.status != 0:
                return Outcome(
                    "loss", f"{what} under {how} ends with {ended.status}: {ended.err[-300:]}", f"{what} {how}"
                )
        if lasting := outlived(folder):
            return Outcome("loss", f"{what} under {how} leaves processes: {lasting}", f"{what} {how} leaves processes")
        return None

    def simpler(self, case: Case) -> Iterator[Case]:
        """With fewer troubles."""
        for at in range(len(case["troubles"])):
            if len(case["troubles"]) > 1:
                yield case | {"troubles": case["troubles"][:at] + case["troubles"][at + 1 :]}

    def command(self, case: Case) -> None:
        """When it is killed is on no command line."""


FUZZ = Kills()


def _names(case: Case) -> str:
    return ", ".join(trouble["how"] for trouble in case["troubles"])


def place(folder: Path) -> Path:
    """A working directory for a run."""
    (folder / "ck").symlink_to(scene.scene() / "ck")
    (folder / "many.txt").write_text(PROMPTS)
    (folder / "sft.jsonl").write_text(scene.TEXTS["sft.jsonl"])
    (folder / "out").mkdir()
    return folder


def started(what: str, folder: Path, trouble: dict[str, Any]) -> Running:
    """Start a run of a kind."""
    return Running.start(folder, MAIN[what], COMMANDS.get(what, "dllm-eval"), trouble)


@cache
def undisturbed_folder(what: str) -> Path:
    """Where a run of this kind was left alone."""
    folder = place(Path(mkdtemp(prefix="dllm-fuzz-")))
    ended = started(what, folder, {}).end()
    if ended is None or ended.status != 0:
        raise RuntimeError(f"{what} does not run even undisturbed: {ended}")
    return folder


@cache
def undisturbed(what: str) -> tuple[Any, int]:
    """What a run leaves that nothing disturbs, and its bytes."""
    folder = undisturbed_folder(what)
    return left.result(what, folder), sum(left.sizes(folder))


def wait(running: Running, folder: Path, size: float) -> None:
    """Wait until the run has written `size` bytes, has ended, or `SECONDS` are over."""
    deadline = time.monotonic() + patient(SECONDS)
    while running.process.is_alive() and sum(left.sizes(folder)) < size and time.monotonic() < deadline:
        time.sleep(0.001)


def _signal(running: Running, how: str) -> None:
    """Send the signal to the process, or kill one of its workers."""
    pid = running.process.pid
    assert pid is not None
    if how == "worker":
        found = children(pid)
        pid, how = (found[len(found) // 2], "kill") if found else (pid, "kill")
    with suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[how])


def outlived(folder: Path) -> list[str]:
    """The command lines of processes in a folder that are still there after `REST` seconds."""
    patience, system = Patience(os.getsid(0)), Path("/proc")
    while found := [int(one.name) for one in system.glob("[0-9]*") if _is_in(int(one.name), folder)]:
        if patience.spent() > patient(REST):
            lines = []
            for pid in found:
                with suppress(OSError):  # it has ended now
                    lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
                    os.kill(pid, signal.SIGKILL)
            return lines
        time.sleep(0.05)
    return []


def _is_in(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return os.path.realpath(f"/proc/{pid}/cwd") == os.path.realpath(folder)
    return False


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
