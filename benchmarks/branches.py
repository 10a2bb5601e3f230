"""Duration of a step by the number of branches that a drafting scheduler computes in it.

    python benchmarks/branches.py                          # llada-8b's shape where there is a GPU, else llada-157m's
    python benchmarks/branches.py --model llada-8b --branches 1,2,4,8,16,32 --json branches.json

One prompt, random weights, blocks of 32 under the dual cache; FreeDave around one token per step. The time of a step is
that between two looks of the host at what a step left (`Engine.poll`); the median over the steps of a generation leaves
out those that open a block. Depths take turns within a repeat, and figures are medians over repeats
with the range. `free`: at most `--slack` times the step of one branch. `accepted`: tokens per forward, which says
nothing of a trained model, whose drafts are better.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from circumstances import circumstances, report
from options import add_json, command, numbers, parser, positive, quantity
from rich.console import Console
from rich.progress import track
from rich.table import Table
from subjects import SIZES, Subject, check, subject

from dllm_sampler.engine.loop import Engine
from dllm_sampler.sampler import Sampler


@dataclass
class Row:
    """One depth; seconds of a step, one per repeat."""

    branches: int
    positions: float = 0.0  # computed per forward
    accepted: float = 0.0
    seconds: list[float] = field(default_factory=list)


def sampler(it: Subject, branches: int) -> Sampler:
    """FreeDave around one token per step; one branch is that alone."""
    return Sampler(
        it.denoiser,
        scheduler={"name": "freedave", "inner": "fixed", "draft": branches},
        blocks={"name": "fixed", "length": it.block},
        stop="none",
        cache="dual",
        cuda_graph="auto",  # or a GPU would wait for the host, and branches cost nothing
    )


def step_seconds(one: Sampler, it: Subject) -> float:
    """Median time of a step of one generation."""
    looks, poll = [], Engine.poll

    def look(*given: Any, **more: Any) -> None:
        poll(*given, **more)
        looks.append(time.perf_counter())

    with patch.object(Engine, "poll", look):
        one.generate(it.prompts(1), max_new_tokens=it.new_tokens)
    return statistics.median(after - before for before, after in pairwise(looks))


def measure(it: Subject, branches: Sequence[int], repeats: int) -> list[Row]:
    """Every depth in turns, after a first generation of each."""
    rows = [Row(n) for n in branches]
    samplers = [sampler(it, row.branches) for row in rows]
    shown = track(range(repeats + 1), "branches", console=Console(stderr=True), transient=True)
    for repeat in shown:
        for row, one in zip(rows, samplers, strict=True):
            if repeat:
                row.seconds.append(step_seconds(one, it))
                continue
            result = one.generate(it.prompts(1), max_new_tokens=it.new_tokens)  # also warms up
            forwards = int(result.nfe)
            row.positions, row.accepted = int(result.trace.rows) / forwards, it.new_tokens / forwards
    return rows


def table(rows: Sequence[Row], slack: float) -> Table:
    """Medians and ranges, and what is free."""
    shown = Table(title="median (lowest to highest) of the repeats")
    for head in ("branches", "positions per forward", "ms per step", "over one branch", "free", "accepted"):
        shown.add_column(head, justify="right")
    alone = rows[0].seconds
    for row in rows:
        ratios = [a / b for a, b in zip(row.seconds, alone, strict=True)]
        ratio = statistics.median(ratios)
        shown.add_row(
            str(row.branches),
            f"{row.positions:.0f}",
            f"{1000 * statistics.median(row.seconds):.2f}",
            f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            "yes" if ratio <= slack else "no",
            f"{row.accepted:.2f}",
        )
    return shown


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    best = "llada-8b" if torch.cuda.is_available() else "llada-157m"
    it = parser(__doc__)
    add = it.add_argument
    add("--model", choices=SIZES, default=best, help="llada-8b needs a GPU (default %(default)s)")
    add(
        "--branches",
        type=numbers,
        default="1,2,4,8,16",
        help="numbers of branches, the first of them 1 (default %(default)s)",
    )
    add("--repeats", type=positive, default=5, help="generations to time for each number (default %(default)s)")
    add(
        "--slack",
        type=quantity,
        default=1.25,
        help="longest step that counts as free, over one branch (default %(default)s)",
    )
    add("--threads", type=positive, default=1, help="threads of torch (default %(default)s)")
    add_json(it)
    options = it.parse_args(argv)
    if options.branches[0] != 1:
        given = ",".join(map(str, options.branches))
        it.error(f"--branches {given}: should begin with 1, which the others are compared with")
    check(options.model)
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    rows = measure(subject(options.model), options.branches, options.repeats)
    about = circumstances(model=options.model)
    report(about, table(rows, options.slack), [asdict(row) for row in rows], options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
