"""How far the commands are that run at this moment: what `dllm-report` says first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from dllm_sampler.core import telling
from dllm_sampler.errors import counted
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import Job
from dllm_sampler.host import files, locks

FILES = ".running-*.json"  # of dllm-eval, docs/formats.md
LOCKS = ".*.lock"  # of dllm-train and dllm-tune


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
    done = sum(RunFolder(job.folder).count() for job in found)
    total = sum(len(job.built_task.samples()) for job in found)
    with telling.telling(output / FILES.replace("*", uuid4().hex), "dllm-eval"):
        telling.tell(done, total, f"samples of {counted(len(found), 'run')}", runs=tuple(job.name for job in found))
        yield


def running(paths: Sequence[Path]) -> list[str]:
    """A line for each command that writes to one of some folders, or makes one of them, at this moment."""
    lines, found = [], set[Path]()
    for path in paths:
        with suppress(OSError, ValueError):  # a name that is too long, or has a NUL: whoever reads it says so
            found |= {file.resolve() for file in files.under(path, FILES, LOCKS)}
            place = path.resolve()
            found.add(place.with_name(f".{place.name}.lock"))  # a training makes its folder in the end
    for file in sorted(found):
        if (state := telling.told(file)) is None:
            continue
        with suppress(OSError, ValueError):
            if state.runs:
                done = sum(RunFolder(file.parent / name).count() for name in state.runs)
                state = replace(state, done=min(state.total, done))
        name = file.name.removeprefix(".").removesuffix(".lock")
        trained = state.command == "dllm-train"  # its file lies next to what it makes
        lines.append(telling.sentence(state, file.with_name(name) if trained else file.parent))
    return lines
