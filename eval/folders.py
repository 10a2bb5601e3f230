"""The directory of a run, which several processes may write to at once. An interruption loses no finished batch."""

import json
import platform
import subprocess
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from dllm_sampler.errors import UserError
from dllm_sampler.eval import checked
from dllm_sampler.eval.checked import SCHEMA
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.records import Record, finite
from dllm_sampler.eval.tasks.base import Task
from dllm_sampler.host import files
from dllm_sampler.host.version import __version__

ABOUT, SAMPLES, PART, LOCK = "run.json", "samples.jsonl", "part-*.jsonl", ".lock"


class RunFolder:
    """The directory of a configuration in `output=FOLDER` of `dllm-eval`. Its name ends in a hash of `config`.

    `run.json` describes the run. A process appends samples to a file of its own, `part-*.jsonl`. When the last sample
    is there, the parts are joined into `samples.jsonl`, in order, in one step. An incomplete line does not count.
    Rerunning the command completes a folder whose `run.json` is lost or whose `samples.jsonl` was cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        self.part: Path | None = None

    def about(self) -> dict[str, Any] | None:
        """Return the content of `run.json`, or None before it is written.

        Raises:
            UserError: the file cannot be read, has another schema, or is invalid.
        """
        try:
            text = (self.path / ABOUT).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:  # also of UTF-8
            raise _unreadable(self.path / ABOUT, error) from error
        return checked.about(self.path / ABOUT, text)

    def begin(self, job: Job, device: str) -> None:
        """Write `run.json`, or add this machine to it when a run resumes.

        An incomplete `samples.jsonl` (cut off, or without `run.json`) becomes a part, since that name is for a complete
        run.

        Raises:
            NotWrittenError: the folder cannot be written.
            UserError: `run.json` is invalid, or does not fit the job.
        """
        files.make_folder(self.path)
        with self._lock():
            if (self.path / SAMPLES).exists() and not self.complete:
                files.move(self.path / SAMPLES, self._new_part())
            found, task, here = self.about(), job.built_task, environment(device)
            places, samples = found["environments"] if found else [], len(task.samples())
            for name, wanted in (("samples", samples), ("score", task.score)):
                if found and found[name] != wanted:
                    checked.differs(self.path / ABOUT, name, found[name], wanted)
            if not found or here not in places:
                about = {
                    "schema": SCHEMA,
                    "name": job.name,
                    "choices": dict(job.choices),
                    "config": job.identity,
                    "samples": samples,
                    "score": task.score,
                    "dependency": task.dependency,
                    "refused": found["refused"] if found else None,
                    "measures": found.get("measures") if found else None,
                    "environments": [*places, here],
                }
                files.write(self.path / ABOUT, json.dumps(about, indent=1, ensure_ascii=False))

    def _lock(self) -> AbstractContextManager[None]:
        return files.locked(self.path / LOCK, keep=True)

    def _new_part(self) -> Path:
        return self.path / f"part-{uuid4().hex}.jsonl"

    def reopen(self) -> None:
        """Remove the reason of an earlier refusal. A command calls it once, before its processes start.

        Raises:
            NotWrittenError: the folder cannot be written.
            UserError: `run.json` cannot be read, has another schema, or is invalid.
        """
        if (found := self.about()) and found["refused"] is not None:
            self.refuse(None)

    def refuse(self, reason: str | None) -> None:
        """Write the reason that this configuration cannot run to `run.json`. None removes it."""
        with self._lock():
            self._change(refused=reason)

    def _change(self, **fields: Any) -> None:
        about = self.about()
        assert about is not None
        files.write(self.path / ABOUT, json.dumps({**about, **fields}, indent=1, ensure_ascii=False))

    @property
    def complete(self) -> bool:
        """True if `run.json` exists and `samples.jsonl` has every sample.

        Raises:
            UserError: `run.json` is invalid, or a line is not a sample of this run.
        """
        about = self.about()
        return about is not None and len(self._read([self.path / SAMPLES])) >= about["samples"]

    def records(self) -> list[Record]:
        """Return the finished samples in the order of their indices."""
        return [record for _, record in sorted(self._lines().items())]

    def done(self) -> set[int]:
        """Return the indices of the finished samples."""
        return set(self._lines())

    def count(self) -> int:
        """Return the number of complete lines of samples. A sample that was run twice counts twice."""
        total = 0
        for file in (*self.path.glob(PART), self.path / SAMPLES):
            with suppress(OSError):  # `records` raises the error
                total += file.read_bytes().count(b"\n")
        return total

    def add(self, records: Iterable[Record]) -> None:
        """Append the samples of a batch to this process's part. They are on the disk when this returns.

        Raises:
            NotWrittenError: the samples cannot be written, for example because the disk is full. Then none is stored.
        """
        if self.part is None:
            self.part = self._new_part()
        files.append(self.part, "".join(_dump(record) for record in records))

    def finish(self, task: Task) -> bool:
        """Join the parts into `samples.jsonl` and return True if all samples are there. Else return False."""
        samples = task.samples()
        with self._lock():
            lines = self._lines()
            if len(lines) < len(samples):
                return False
            if not self.complete:
                records = [record for _, record in sorted(lines.items())]
                measures = task.together(samples, [record.graded for record in records])
                rounded = {name: finite(float(f"{value:.6g}")) for name, value in measures.items()}
                self._change(measures=rounded or None, refused=None)  # first, so that what is complete has them
                files.write(self.path / SAMPLES, "".join(map(_dump, records)))
            self.tidy()
        return True

    def tidy(self) -> None:
        """Remove the parts of a complete run, which an interrupted process may have left."""
        for part in self.path.glob(PART):
            with files.reported(part):
                part.unlink(missing_ok=True)
        self.part = None

    def _lines(self) -> dict[int, Record]:
        # The whole file last: parts that vanish while they are read are in it.
        return self._read([*sorted(self.path.glob(PART)), self.path / SAMPLES])

    def _read(self, places: Iterable[Path]) -> dict[int, Record]:
        """Return the samples of some files, by index. A missing file has none."""
        found: dict[int, Record] = {}
        about = self.about()
        for file in places:
            try:
                *lines, torn = file.read_bytes().split(b"\n")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise _unreadable(file, error) from error
            records = [checked.sample(file, number, line, about) for number, line in enumerate(lines, 1) if line]
            with suppress(ValueError):  # a line without its end was cut in the middle, or is the last one edited
                records.append(checked.parse(torn, about))
            found |= {record.index: record for record in records}
        return found


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", "it is not UTF-8")
    return UserError("file-unreadable", f"{file} cannot be read ({reason}). Check its permissions, or remove it.")


def _dump(record: Record) -> str:
    return json.dumps(record.line(), ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


@cache
def environment(device: str) -> dict[str, Any]:
    """Return an item of `environments` in `run.json`: versions, git commit, device, processor and platform."""
    import torch  # which readers of runs do not wait for

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
    """Return the git commit of this package's folder, with `+` if files differ from it. None outside a repository."""

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
    """Return the name of the GPU for a CUDA device, else of the CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()
