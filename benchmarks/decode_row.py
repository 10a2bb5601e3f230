"""One line of `decode_step.py`'s table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

HEADS = {"kind": 8, "side": 8, "batch": 5, "window": 6, "ms": 9, "spread": 20, "floor ms": 8, "over read": 9}
HEADS |= {"over copy": 9, "outside": 7, "speed": 20, "": 0}  # the columns and their widths; the last one has notes


@dataclass
class Row:
    """Measurements of one configuration, in seconds."""

    kind: str  # window, refresh, generate, uncached, official, readout
    side: str
    batch: int
    window: int
    read: float | None = None  # the floor at the bandwidth of reading
    copy: float | None = None  # the floor at the bandwidth of a copy
    seconds: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)  # the model alone
    plain: list[float] = field(default_factory=list)  # the loop that a generation is compared with
    answers: str = ""  # how many tokens there are, and how many differ
    note: str = ""  # what went wrong: that it failed, that a side fell back to torch


def line(cells: Iterable[str]) -> str:
    """One line of the table."""
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, HEADS.values(), strict=True)).rstrip()


def cells(row: Row) -> list[str]:
    """A row as people read it: medians, with the lowest and the highest."""
    said = "; ".join(filter(None, (row.answers, row.note)))
    shown = [row.kind, row.side, str(row.batch), str(row.window), *[""] * 7, said]
    if row.seconds:
        ours = statistics.median(row.seconds)
        shown[4] = f"{ours * 1e3:.3f}"
        shown[5] = f"{min(row.seconds) * 1e3:.3f} to {max(row.seconds) * 1e3:.3f}"
        if row.read is not None and row.copy is not None:
            shown[6:9] = f"{row.read * 1e3:.3f}", f"{ours / row.read:.2f}", f"{ours / row.copy:.2f}"
        if row.model:
            shown[9] = f"{1 - statistics.median(row.model) / ours:.1%}"
        if row.plain:
            ratios = [theirs / own for theirs, own in zip(row.plain, row.seconds, strict=True)]
            shown[10] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return shown
