"""What a run found, on the disk after each case: a run that is killed loses none of it, and `--first` goes on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from dllm_sampler.core.files import make_folder, write
from dllm_sampler.errors import UserError

Kind = Literal["passed", "refused", "traceback", "hang", "wrong", "loss"]
FAILURES: tuple[Kind, ...] = ("traceback", "hang", "wrong", "loss")


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    kind: `wrong`: the result breaks a promise, or a mistake was accepted; `loss`: records were lost or doubled
    about: what happened, in one line
    fault: what two cases with the same fault have in common
    """

    kind: Kind
    about: str = ""
    fault: str = ""

    @property
    def failed(self) -> bool:
        """Whether it must not have ended like this."""
        return self.kind in FAILURES


@dataclass
class Tally:
    """What a run found.

    first, next: number of its first case, and of the case that it would try next
    counts: outcomes by kind; faults: how many cases showed each; saved: the file of the smallest case of each
    troubles: how often a run was killed or disturbed; notes: what cases that passed said
    """

    name: str
    seed: int
    first: int = 0
    next: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    saved: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    troubles: int = 0

    @staticmethod
    def begun(name: str, seed: int, first: int, folder: Path | None) -> Tally:
        """The tally in `folder` that ends before case `first`, or a new one.

        Raises:
            UserError: a tally is damaged.
        """
        for file in sorted(folder.glob(f"tally-{name}-{seed}-*.json")) if folder is not None and first else ():
            try:
                found = _read(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"{file} is no tally of a fuzz run: remove it, or choose another --output") from None
            if found.next == first:
                return found
        return Tally(name, seed, first, first)

    def save(self, folder: Path) -> None:
        """Write it where `begun` finds it."""
        make_folder(folder)
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        write(folder / f"tally-{self.name}-{self.seed}-{self.first}.json", json.dumps(values, indent=1) + "\n")

    def add(self, outcome: Outcome, troubles: int, seconds: float) -> str | None:
        """Count how case `next` ended; returns its fault where it is the first one that shows it."""
        self.counts[outcome.kind] += 1
        self.troubles, self.seconds, self.next = self.troubles + troubles, seconds, self.next + 1
        if not outcome.failed:
            self.notes.update([outcome.about] if outcome.kind == "passed" and outcome.about else [])
            return None
        fault = f"{outcome.kind} {outcome.fault}"
        self.faults[fault] += 1
        return fault if self.faults[fault] == 1 else None

    @property
    def tried(self) -> int:
        """Cases in all."""
        return self.counts.total()

    @property
    def failed(self) -> int:
        """Cases that failed."""
        return sum(self.counts[kind] for kind in FAILURES)

    def table(self) -> Table:
        """The figures of the run."""
        table = Table(box=None, pad_edge=False)
        titles = ("cases", "tried", *get_args(Kind)[:2], "tracebacks", "hangs", "silent wrongs", "losses", "seed", "s")
        for title in titles:
            table.add_column(title, justify="left" if title == "cases" else "right")
        figures = [self.tried, *(self.counts[kind] for kind in get_args(Kind)), self.seed, round(self.seconds)]
        table.add_row(self.name, *map(str, figures))
        return table


def _read(values: dict[str, Any]) -> Tally:
    counted = {name: Counter(values[name]) for name in ("counts", "faults", "notes")}
    return Tally(**{**values, **counted, "saved": dict(values["saved"])})
