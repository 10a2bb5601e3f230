"""What a running command tells other processes: how far it is, and since when. `dllm-report FOLDER` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dllm_sampler.host import files, locks

SCHEMA = 2  # docs/formats.md
EVERY = 0.5  # seconds from one change of the file to the next
SIZE = 1024  # bytes of the file: it is overwritten at once, and never longer or shorter


@dataclass(frozen=True)
class State:
    """How far a command is.

    Args:
        command: as it is called.
        stage: what is being done, where a command does several things one after another.
        unit: what is counted.
        done: how many of them are done.
        total: how many there will be.
        before: how many of them were done when it began: of a run that goes on.
        begun: when it began with them, in seconds of the monotonic clock.
        boot: since which start of which machine that clock counts; None where the system does not say.
        runs: folders whose samples are counted in place of `done`, which several processes may write.
        schema: of the file.
    """

    command: str
    stage: str | None = None
    unit: str = ""
    done: int = 0
    total: int = 0
    before: int = 0
    begun: float = 0.0
    boot: str | None = None
    runs: tuple[str, ...] = ()
    schema: int = SCHEMA


@dataclass
class Teller:
    """Writes the state of a command to the file that it has locked."""

    file: int
    state: State
    written: float = 0.0

    def write(self, state: State) -> None:
        """Overwrite the state."""
        self.state, self.written = state, time.monotonic()
        with suppress(OSError):  # a full disk is for the command itself to notice
            files.overwrite(self.file, (json.dumps(asdict(state)).ljust(SIZE - 1) + "\n").encode())


_TELLER: ContextVar[Teller | None] = ContextVar("teller", default=None)


@contextmanager
def telling(path: Path, command: str, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a file in which other processes find what `tell` says; it ends with the process.

    Args:
        path: the file; see `locks.locked`, also for errors.
        command: as it is called.
        busy: what is said where another process holds the lock; None: wait for it.
    """
    with locks.locked(path, busy) as file:
        reset = _TELLER.set(Teller(file, State(command)))
        try:
            yield
        finally:
            _TELLER.reset(reset)


def tell(done: int, total: int, unit: str = "", *, stage: str | None = None, runs: tuple[str, ...] = ()) -> None:
    """Say how far the command is, as the fields of `State` say it. Without a command, nothing happens."""
    teller, now = _TELLER.get(), time.monotonic()
    if teller is None:
        return
    state = teller.state
    if (state.stage, state.unit, state.total, state.runs) != (stage, unit, total, runs):
        teller.write(State(state.command, stage, unit, done, total, done, now, _boot(), runs))
    elif done != state.done and (now - teller.written >= EVERY or done >= total):
        teller.write(replace(state, done=done))


def told(file: Path) -> State | None:
    """What the command that holds a file says in it; None: no command does, or it has not said anything yet."""
    with suppress(OSError, ValueError, TypeError, RecursionError):  # it has just begun, or just ended
        if locks.held(file) and (text := file.read_text(encoding="utf-8")):
            found = State(**json.loads(text))
            return found if found.schema == SCHEMA and found.total else None
    return None


def sentence(state: State, place: Path) -> str:
    """A line for a person."""
    stage, unit = f"{state.stage}: " if state.stage else "", f" {state.unit}" if state.unit else ""
    line = f"{place}: {state.command} is running, {stage}{state.done} of {state.total}{unit}"
    if state.boot is None or state.boot != _boot():  # a clock of another machine says nothing here
        return line
    seconds, made = time.monotonic() - state.begun, state.done - state.before
    line += f", {_duration(seconds)} so far"
    return line if made <= 0 else f"{line}, about {_duration(seconds * (state.total - state.done) / made)} to go"


def _duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _boot() -> str | None:
    """Since which start of which machine its monotonic clock counts; None where the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return None
