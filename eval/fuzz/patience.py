"""Time limits on a machine that others use, too: what a process waits for a core is no time of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

SLOW = [1.0]  # how much longer everything may take, besides
LOOK = 5.0  # seconds from one look at the processes to the next


def patient(seconds: float) -> float:
    """A time limit on this machine."""
    return seconds * SLOW[0]


class Patience:
    """The time since this was made, without what processes waited for a core.

    Where several waited at the same time it is the longest of their waits. Where the system tells of none it is all the
    time.

    Args:
        session: of the processes.
    """

    def __init__(self, session: int):
        self.session, self.looked, self.own = session, time.monotonic(), 0.0
        self.waits = dict(self._waited())

    def spent(self) -> float:
        """Seconds, as of the last look."""
        gone = time.monotonic() - self.looked
        if gone >= LOOK:
            waits = dict(self._waited())
            # A wait is told when it is over, so that it may be longer than the time since the last look.
            longest = max((wait - self.waits.get(pid, 0.0) for pid, wait in waits.items()), default=0.0)
            self.looked, self.waits, self.own = self.looked + gone, self.waits | waits, self.own + gone - longest
        return self.own

    def poll(self, line: Connection, seconds: float) -> bool:
        """Whether something comes through the line before `seconds` are spent."""
        while not line.poll(min(LOOK, seconds)):
            if self.spent() > patient(seconds):
                return False
        return True

    def _waited(self) -> Iterator[tuple[int, float]]:
        for pid in members(self.session):
            with suppress(OSError, IndexError, ValueError):  # it has ended
                yield pid, int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(folder.name))
    return found
