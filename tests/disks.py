"""Disks that fill up, without being root: a limit on the size of files, or a call to the system that fails."""

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: the write that would is cut there, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it, where nothing else was asked for
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def fail(monkeypatch: pytest.MonkeyPatch, name: str, at: int = 1) -> list[int]:
    """`os.NAME` fails at its call number `at`, from 1, for want of space; returns what grows by one at each call."""
    plain, calls = getattr(os, name), []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return calls
