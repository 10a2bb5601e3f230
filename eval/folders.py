"""The directory of a run: written so that it can be cut off anywhere, and by several processes at once."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock

from dllm_sampler import __version__
from dllm_sampler.errors import UserError
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.markdown import write
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.tasks.base import Task

SCHEMA = 2  # of run.json; docs/formats.md
ABOUT, SAMPLES, PART, LOCK = "run.json", "samples.jsonl", "part-*.jsonl", ".lock"


class RunFolder:
    """What a run has done so far.

    A process appends samples as they are done to a part of its own; when the last sample is there the parts become
    `samples.jsonl`, in order, at once. A line that was cut in the middle is no line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.part: Path | None = None

    def about(self) -> dict[str, Any] | None:
        """`run.json`; None before it is written.

        Raises:
            UserError: it is of another schema.
        """
        try:
            found = json.loads((self.path / ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / ABOUT} cannot be read: {error}") from error
        if found.get("schema") != SCHEMA:
            raise UserError(
                f"{self.path} is no run of schema {SCHEMA}, the one this version reads: run again into another folder"
            )
        return found

    def begin(self, job: Job, device: str) -> None:
        """Write down what is run and where; a run that goes on elsewhere is told so, too.

        Raises:
            UserError: nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / LOCK)
            with lock:
                self._note(job, environment(device))
        except OSError as error:
            raise UserError(f"results cannot be kept in {self.path}: {error.strerror}") from error

    def _note(self, job: Job, here: dict[str, Any]) -> None:
        found = self.about()
        places = found["environments"] if found else []
        if found and here in places:
            return
        task = job.built_task
        about = {
            "schema": SCHEMA,
            "name": job.name,
            "choices": dict(job.choices),
            "config": job.identity,
            "samples": len(task.samples()),
            "score": task.score,
            "dependency": task.dependency,
            "refused": found["refused"] if found else None,
            "measures": found.get("measures") if found else None,
            "environments": [*places, here],
        }
        write(self.path / ABOUT, json.dumps(about, indent=1, ensure_ascii=False))

    def reopen(self) -> None:
        """Forget that it was refused: once, when a command starts. Its processes may find so again, in any order.

        Raises:
            UserError: it cannot be read, or is of another schema.
        """
        with suppress(OSError):  # where nothing can be written `begin` says so
            if (found := self.about()) and found["refused"] is not None:
                self.refuse(None)

    def refuse(self, reason: str | None) -> None:
        """Note why this configuration cannot run."""
        with FileLock(self.path / LOCK):
            self._change(refused=reason)

    def _change(self, **fields: Any) -> None:
        about = self.about()
        assert about is not None
        write(self.path / ABOUT, json.dumps({**about, **fields}, indent=1, ensure_ascii=False))

    @property
    def complete(self) -> bool:
        """Whether every sample is there."""
        return (self.path / SAMPLES).exists()

    def records(self) -> list[Record]:
        """The samples that are there, in order."""
        return [Record.of(line) for _, line in sorted(self._lines().items())]

    def done(self) -> set[int]:
        """The samples that are there, by index."""
        return set(self._lines())

    def count(self) -> int:
        """About how many samples are there: lines, without reading them."""
        total = 0
        for file in (*self.path.glob(PART), self.path / SAMPLES):
            with suppress(FileNotFoundError, NotADirectoryError):
                total += file.read_bytes().count(b"\n")
        return total

    def add(self, records: Iterable[Record]) -> None:
        """Append the samples of a batch; once this returns they survive whatever happens."""
        if self.part is None:
            self.part = self.path / f"part-{uuid4().hex}.jsonl"
        text = "".join(_dump(record.line()) for record in records)
        with self.part.open("ab", buffering=0) as file:
            file.write(text.encode())
            os.fsync(file.fileno())

    def finish(self, task: Task) -> bool:
        """Put the parts together if all samples are there; returns whether they are."""
        samples = task.samples()
        with FileLock(self.path / LOCK):
            lines = self._lines()
            if len(lines) < len(samples):
                return False
            if not self.complete:
                records = [Record.of(line) for _, line in sorted(lines.items())]
                measures = task.together(samples, [record.graded for record in records])
                rounded = {name: float(f"{value:.6g}") for name, value in measures.items()}
                self._change(measures=rounded or None, refused=None)  # first, so that what is complete has them
                write(self.path / SAMPLES, "".join(_dump(line) for _, line in sorted(lines.items())))
            self.tidy()
        return True

    def tidy(self) -> None:
        """Remove the parts of a complete run: a process may have been ended before it could."""
        for part in self.path.glob(PART):
            part.unlink(missing_ok=True)
        self.part = None

    def _lines(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        # The whole file last: parts that vanish while they are read are in it.
        for file in (*sorted(self.path.glob(PART)), self.path / SAMPLES):
            with suppress(FileNotFoundError, NotADirectoryError):
                for line in file.read_bytes().split(b"\n"):
                    with suppress(ValueError, KeyError, TypeError):  # cut in the middle
                        entry = json.loads(line)
                        Record.of(entry)
                        found[entry["index"]] = entry
        return found


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


@cache
def environment(device: str) -> dict[str, Any]:
    """What ran it: versions, the commit of the code, the machine."""
    import torch  # which readers of runs need not wait for

    packages = {}
    for name in ("transformers", "hydra-core", "safetensors", "numpy"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "dllm_sampler": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "device": device,
        "processor": processor(device),
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The git commit of this package's folder, `+` if files differ from it; None outside a repository."""

    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", "--error-unmatch", Path(__file__).name) == "":
            return None
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None


def processor(device: str) -> str:
    """The name of what computes."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()
