"""What the user sees and does of a running trainer: a bar on stderr, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dllm_sampler.core.telling import tell


class _Bar(Progress):
    """A bar with one task; other processes learn how far it is."""

    stage = ""  # what it showed first: figures may follow

    def advance(self, *args: Any, **fields: Any) -> None:
        super().advance(*args, **fields)
        self.tell()

    def update(self, *args: Any, **fields: Any) -> None:
        super().update(*args, **fields)
        self.tell()

    def tell(self) -> None:
        (task,) = self.tasks
        tell(int(task.completed), int(task.total or 0), stage=self.stage)


def bar(description: str, total: int, completed: int = 0) -> Progress:
    """A bar with one task, which `advance(0)` and `update(0, ...)` move; show it with `with`.

    `dllm-report` in another terminal tells of a `dllm-train` what its bar shows.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    progress = _Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    progress.add_task(description, total=total, completed=completed)
    progress.stage = description
    progress.tell()
    return progress


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, so that a step is never cut in half; a second one works as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
