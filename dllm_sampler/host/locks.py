"""Lock files: one process at a time holds one, and other processes can see that it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dllm_sampler.errors import UserError
from dllm_sampler.host import files


@contextmanager
def locked(path: Path, busy: str | None = None, *, keep: bool = False) -> Iterator[int]:
    """Hold the lock of a file that is there for nothing else; the lock ends with the process, however it ends.

    Args:
        path: the file.
        busy: what is said where another process holds the lock; None: wait for it.
        keep: leave the file there, which is quicker where processes take turns.

    Yields:
        The open file: other processes may read what is written to it.

    Raises:
        NotWrittenError: the file cannot be made.
        UserError: another process holds the lock, with the sentence `busy`.
    """
    file = _taken(path, wait=busy is None)
    if file is None:
        raise UserError(busy or "")
    try:
        with files.reported(path):
            os.ftruncate(file, 0)  # a process that was killed may have left some
        yield file
    finally:
        if not keep:
            with suppress(OSError):
                path.unlink()
        os.close(file)


def held(path: Path) -> bool:
    """Whether a process holds the lock of a file at this moment."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not files.lock(file, wait=False)
    finally:
        os.close(file)


def _taken(path: Path, wait: bool) -> int | None:
    """The number of the lock file, made where it does not exist, opened and locked; None: another process holds it."""
    while True:
        with files.reported(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not files.lock(file, wait):
            os.close(file)
            return None
        with suppress(OSError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)  # the process that had the lock removed the file: another process would make a new one
