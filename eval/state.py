"""What a `dllm-eval` that is running tells other processes: how many samples it is to make, and since when."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from dllm_sampler.core import locks
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import Job

FILES = ".running-*.json"  # docs/formats.md


@contextmanager
def told(found: Sequence[Job]) -> Iterator[None]:
    """Keep a locked file in the output folder as long as the jobs run. The lock ends with the process, however it ends.

    Raises:
        NotWrittenError: the file cannot be written.
    """
    output = Path(found[0].options.output).expanduser()
    for stale in output.glob(FILES):  # of a process that was killed
        if not locks.held(stale):
            stale.unlink(missing_ok=True)
    file = output / FILES.replace("*", uuid4().hex)
    about = {
        "schema": 1,
        "runs": [job.name for job in found],
        "samples": sum(len(job.built_task.samples()) for job in found),
        "done": sum(RunFolder(job.folder).count() for job in found),
        "boot": _boot(),
        "begun": time.monotonic(),
    }
    with locks.locked(file, content=json.dumps(about) + "\n"):
        yield


def running(paths: Sequence[Path]) -> list[str]:
    """A line for each `dllm-eval` that writes to one of some folders at this moment."""
    lines, found = [], set[Path]()
    for path in paths:
        with suppress(OSError, ValueError):  # a name that is too long, or has a NUL: whoever reads it says so
            found |= {file.resolve() for file in path.rglob(FILES)}
    for file in sorted(found):
        with suppress(OSError, ValueError, KeyError, TypeError):  # it has just begun, or just ended
            if locks.held(file):
                lines.append(_line(file))
    return lines


def _line(file: Path) -> str:
    about = json.loads(file.read_text(encoding="utf-8"))
    done = min(about["samples"], sum(RunFolder(file.parent / name).count() for name in about["runs"]))
    runs = "1 run" if len(about["runs"]) == 1 else f"{len(about['runs'])} runs"
    line = f"{file.parent}: dllm-eval is running, {done} of {about['samples']} samples of {runs}"
    if about["boot"] is None or about["boot"] != _boot():  # a clock of another machine says nothing here
        return line
    seconds, made = time.monotonic() - about["begun"], done - about["done"]
    line += f", {_duration(seconds)} so far"
    return line if made <= 0 else f"{line}, about {_duration(seconds * (about['samples'] - done) / made)} to go"


def _duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _boot() -> str | None:
    """Since which start of which machine its monotonic clock counts; None where the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return None
