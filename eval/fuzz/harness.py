"""What the three kinds of fuzzing share: cases by number, outcomes, time limits, smaller failures, and the table."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dllm_sampler.core.files import make_folder, write
from dllm_sampler.errors import UserError
from dllm_sampler.eval.fuzz.patience import SLOW, Patience, patient
from dllm_sampler.eval.fuzz.tally import Outcome, Tally

Case = dict[str, Any]  # as JSON has it
MEMORY = 12 * 2**30  # bytes of address space that a case may take
SMALLER = 60  # cases that are tried to make a failure smaller
PATIENCE = 40.0  # seconds for that


PASSED = Outcome("passed")


class Fuzz(Protocol):
    """A class of cases. `limit`: seconds that one may take."""

    limit: ClassVar[float]

    def draw(self, random: Random) -> Case:
        """A case by chance."""
        ...

    def check(self, case: Case) -> Outcome:
        """Try it; what it raises is judged by `guarded`."""
        ...

    def simpler(self, case: Case) -> Iterator[Case]:
        """Cases that are a little smaller, the smallest first."""
        ...

    def command(self, case: Case) -> str | None:
        """The case as a command of its own, where it is one."""
        ...


def named(name: str) -> Fuzz:
    """The class of cases `batches`, `inputs` or `kills`."""
    return import_module(f"dllm_sampler.eval.fuzz.{name}").FUZZ


def drawn(name: str, seed: int, number: int) -> Case:
    """Case `number` of a seed: the same in every process."""
    return named(name).draw(Random(f"{name} {seed} {number}"))


def guarded(check: Callable[[Case], Outcome], case: Case) -> Outcome:
    """The outcome of a check, with what it raised."""
    try:
        return check(case)
    except UserError as error:
        return sentence(str(error))
    except Exception as error:
        return crashed(error)


LONGEST = 3000  # characters of a refusal: the longest lists all settings of a group


def sentence(said: str) -> Outcome:
    """A refusal, which is one sentence of a readable length."""
    if not said.strip() or "Traceback" in said or len(said) > LONGEST:
        return Outcome("wrong", f"the refusal is no sentence: {said[:200]!r}", "refusal")
    return Outcome("refused", said)


def crashed(error: BaseException) -> Outcome:
    """An exception that is no `UserError`: its fault is its type and the innermost place in this package."""
    frames = [
        f"{Path(one.filename).name}:{one.name}"
        for one in traceback.extract_tb(error.__traceback__)
        if "dllm_sampler" in one.filename or "/eval/" in one.filename
    ]
    where = next((one for one in reversed(frames) if not one.startswith("harness")), "")
    said = next(iter(str(error).splitlines()), "")
    return Outcome("traceback", f"{type(error).__name__} in {where}: {said[:300]}", f"{type(error).__name__} {where}")


class Worker:
    """A process that tries one case after another; one that takes too long is ended, and the next gets a new one."""

    def __init__(self, name: str) -> None:
        self.name, self.limit = name, named(name).limit
        self.process: SpawnProcess | None = None
        self.line: Connection | None = None
        self.place = TemporaryDirectory(prefix="dllm-fuzz-", ignore_cleanup_errors=True)  # of all that cases write

    def __call__(self, case: Case) -> Outcome:
        """How a case ends."""
        process, line = self._running()
        try:
            line.send(case)
            if Patience(process.pid or 0).poll(line, self.limit):
                return Outcome(**line.recv())
        except (EOFError, OSError):
            process.join()
            code = process.exitcode
            self.process = None
            return Outcome("traceback", f"the process ended with status {code}", f"status {code}")
        self.close()
        return Outcome("hang", f"no end after {patient(self.limit):.0f} s", "hang")

    def close(self) -> None:
        """End the process and those that it started."""
        if self.process is not None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            self.process = None

    def _running(self) -> tuple[SpawnProcess, Connection]:
        if self.process is None or self.line is None or not self.process.is_alive():
            processes = multiprocessing.get_context("spawn")
            self.line, other = processes.Pipe()
            self.process = processes.Process(target=serve, args=(self.name, other, self.place.name, SLOW[0]))
            self.process.start()
            other.close()
            self.line.recv()  # it has imported all it needs: from here on the time counts
        return self.process, self.line


def serve(name: str, line: Connection, place: str, factor: float) -> None:
    """What a worker does: a case comes, its outcome goes; temporary files lie in `place`."""
    os.setsid()
    SLOW[0] = factor
    os.environ["TMPDIR"] = tempfile.tempdir = place
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    fuzz = named(name)
    line.send(None)
    while True:
        try:
            case = line.recv()
        except EOFError:
            return
        line.send(asdict(guarded(fuzz.check, case)))


def shrunk(fuzz: Fuzz, attempt: Callable[[Case], Outcome], case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """The smallest case found with the same fault, and its outcome.

    A case that takes too long stays as it is: each smaller one would take as long, and might be slow otherwise.
    """
    begun, tried, smaller = time.monotonic(), 0, outcome.kind != "hang"
    while smaller:
        smaller = False
        for one in fuzz.simpler(case):
            if tried >= SMALLER or time.monotonic() - begun > patient(PATIENCE):
                return case, outcome
            tried += 1
            found = attempt(one)
            if (found.kind, found.fault) == (outcome.kind, outcome.fault):
                case, outcome, smaller = one, found, True
                break
    return case, outcome


def run(
    name: str,
    seed: int,
    *,
    seconds: float = float("inf"),
    cases: int | None = None,
    first: int = 0,
    folder: Path | None = None,
    attempt: Callable[[Case], Outcome] | None = None,
    console: Console | None = None,
) -> Tally:
    """Try cases until the time is over or there are enough.

    Args:
        name: `batches`, `inputs` or `kills`.
        seed: with the number of a case it says which case that is.
        seconds: from the first case on.
        cases: how many at most.
        first: number of the first one. A tally in `folder` that ends before it goes on.
        folder: failures, and the tally after each case, are saved there; None: nowhere.
        attempt: tries a case; None: a process of its own does.
        console: where failures are told; None: standard error.
    """
    console = Console(stderr=True) if console is None else console
    tally, worker = Tally.begun(name, seed, first, folder), None
    if attempt is None:
        attempt = worker = Worker(name)
    before, begun = tally.seconds, time.monotonic()
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(name, total=None)
            while time.monotonic() - begun < seconds and (cases is None or tally.next < first + cases):
                case = drawn(name, seed, tally.next)
                outcome = attempt(case)
                fault = tally.add(outcome, len(case.get("troubles", ())), before + time.monotonic() - begun)
                path = None if folder is None else folder / f"{name}-{seed}-{tally.next - 1}.json"
                if fault is not None:
                    tally.saved[fault] = str(path or "")
                    _save(name, path, case, outcome)  # a run that is killed while it looks for a smaller one has this
                if folder is not None:
                    tally.save(folder)
                if fault is not None:
                    case, outcome = shrunk(named(name), attempt, case, outcome)
                    _save(name, path, case, outcome)
                    _tell(name, path, case, outcome, f"case {tally.next - 1} of seed {seed}", console)
                about = f"{name}: {tally.tried} tried, {tally.counts['refused']} refused, {tally.failed} failed"
                progress.update(bar, description=about)
    finally:
        if worker is not None:
            worker.close()
    return tally


def _save(name: str, path: Path | None, case: Case, outcome: Outcome) -> None:
    """Save a case that `replayed` reads."""
    if path is not None:
        make_folder(path.parent)
        write(path, json.dumps({"cases": name, "case": case, "outcome": asdict(outcome)}, indent=1) + "\n")


def _tell(name: str, path: Path | None, case: Case, outcome: Outcome, which: str, console: Console) -> None:
    """Tell a failure, with the commands that show it."""
    console.print(Text(f"{outcome.kind}, {which}: {outcome.about}"), soft_wrap=True)
    if (line := named(name).command(case)) is not None:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if path is not None:
        console.print(Text(f"  python -m dllm_sampler.eval.fuzz {name} --case {path}"), soft_wrap=True)


def replayed(path: Path) -> tuple[str, Outcome]:
    """The class of a saved case, and how it ends now.

    Raises:
        UserError: the file holds no case.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        name, case = saved["cases"], saved["case"]
        named(name)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ImportError):
        raise UserError(f"{path} is no case that a fuzz run saved") from None
    worker = Worker(name)
    try:
        return name, worker(case)
    finally:
        worker.close()
