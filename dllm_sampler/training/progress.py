"""The progress bar of the trainers, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar(description: str, total: int, completed: int = 0) -> Progress:
    """A bar with one task, which `advance(0)` and `update(0, ...)` move; show it with `with`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    progress.add_task(description, total=total, completed=completed)
    return progress
