"""What the user sees and does of a running trainer: a bar on stderr, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar(description: str, total: int, completed: int = 0) -> Progress:
    """Return a bar with one task, which `advance(0)` and `update(0, ...)` move. Show it with `with`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    progress.add_task(description, total=total, completed=completed)
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
