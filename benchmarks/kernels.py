"""Speed of each kernel, compared with its torch reference and with a copy of the bytes that it must move.

    python benchmarks/kernels.py                        # on a GPU
    python benchmarks/kernels.py --smoke                # tiny sizes, once: does it run?
    python benchmarks/kernels.py --only readout --json kernels.json
    python benchmarks/kernels.py --aot                  # what each kernel takes of four GPUs, compiled without one
    python benchmarks/kernels.py --aot --target sm_90 --only "head bf16" --json report.json

Kernel and reference are measured in turns. On a GPU each is replayed in a CUDA graph of many calls, every call on data
of its own, a gigabyte in all, so that its inputs are not in the cache (`clocks.py`).

`ratio`     time of the reference over time of the kernel, the median of the repeats with its range.
`of read`   the bytes a kernel cannot avoid (inputs once, outputs once), over its time, over the bandwidth of reading
            measured in the same process. 100 %: as fast as memory allows.
`of copy`   the same over the bandwidth of a copy, for kernels that write as much as they read.

A kernel that fails, falls back to torch or gives another answer than its reference says so in its line. Each line is in
`--json` as soon as it is measured.
Without a GPU only the references are timed, on the CPU, at small sizes.

With `--aot` every configuration of every kernel is compiled, and nothing is measured (`ahead_of_time.py`).
Exit status: 1 if a kernel does not compile or needs more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import ahead_of_time
import torch
from circumstances import attempt, circumstances, save, show
from clocks import Bandwidth, Clock, bandwidth
from kernel_cases import Case, cases
from options import add_json, add_smoke, command, parsed, parser, positive
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

from dllm_sampler.core.values import Readout
from dllm_sampler.errors import UserError
from dllm_sampler.kernels.backend import TORCH, Backend, select

TOLERANCE = 0.02  # of the norm, or of a probability or nat: more is a wrong answer, which has no figure


@dataclass
class Row:
    """Measurements: seconds per call, one per repeat."""

    name: str
    moved: int = 0  # bytes that cannot be avoided
    kernel: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.kernel, self.reference, strict=False)]


def noted(case: Case, fused: Backend, clock: Clock, repeats: int) -> Row:
    """Measure a case. A kernel that failed, or fell back to torch, has no seconds."""
    row, note = attempt(lambda: measure(case, fused, clock, repeats))
    row = row or Row(case.name)
    return replace(row, kernel=[], note=note) if note else row


def measure(case: Case, fused: Backend, clock: Clock, repeats: int) -> Row:
    """Kernel and reference in turns, on the same data."""
    first = case.make()
    works = [first, *(case.make() for _ in range(clock.copies(first.moved) - 1))]
    row = Row(case.name, first.moved)
    if fused is not TORCH:
        compare(first.run(fused), first.run(TORCH))
    sides = [(row.reference, TORCH)] + ([] if fused is TORCH else [(row.kernel, fused)])
    timers = [(seconds, clock.replayed([partial(work.run, it) for work in works])) for seconds, it in sides]
    for _ in range(repeats):
        for seconds, timer in timers:
            seconds.append(timer())
    return row


def compare(ours: Any, theirs: Any) -> None:
    """Compare the answers of a kernel and of its reference.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    if isinstance(ours, Readout):  # where two tokens are about as good, rounding chooses
        pairs = [(ours.confidence, theirs.confidence), (ours.entropy, theirs.entropy)]
        errors = [float((one.double() - other.double()).abs().median()) for one, other in pairs]
    else:
        pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
        norms = [(one.double() - other.double(), other.double()) for one, other in pairs if one is not None]
        errors = [float(apart.norm() / whole.norm()) for apart, whole in norms]
    if not all(error <= TOLERANCE for error in errors):
        raise RuntimeError("the result differs from the reference's")


def table(rows: list[Row], moves: Bandwidth) -> Table:
    out = Table(title="median of the repeats (lowest to highest)")
    out.add_column("case")
    for name in ("kernel us", "torch us", "ratio", "spread", "of read", "of copy", ""):
        out.add_column(name, justify="right")
    for row in rows:
        torchs = f"{statistics.median(row.reference) * 1e6:.1f}" if row.reference else ""
        cells = ["not measured", torchs, "", "", "", "", row.note]
        if row.kernel:
            ours = statistics.median(row.kernel)
            cells[0] = f"{ours * 1e6:.1f}"
            cells[2] = f"{statistics.median(row.ratios):.2f}"
            cells[3] = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
            cells[4:6] = (f"{row.moved / ours / most:.0%}" for most in (moves.read, moves.copy))
        out.add_row(row.name, *cells)
    return out


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--only", action="append", metavar="TEXT", help="cases whose name contains it; may be repeated (default: all)")
    add("--repeats", type=positive, default=7, help="replays of a graph (default %(default)s)")
    targets = ", ".join(ahead_of_time.TARGETS)
    add("--aot", action="store_true", help="compile the kernels ahead of time, and measure nothing")
    add("--target", action="append", metavar="NAME", help=f"of --aot: {targets}; may be repeated (default: all)")
    add("--processes", type=positive, default=2, help="of --aot: compilers at work at once (default %(default)s)")
    add_json(it)
    add_smoke(it, "tiny sizes, once: does it run?")
    options = parsed(it, argv, repeats=1)
    if options.target and not options.aot:
        it.error("--target is an option of --aot: add it")
    return options


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    only = options.only or [""]
    if options.aot:
        targets = options.target or list(ahead_of_time.TARGETS)
        return ahead_of_time.report(targets, only, options.processes, options.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = (case for case in cases(device, options.smoke) if any(text in case.name for text in only))
    first = next(chosen, None)
    if first is None:
        raise UserError(
            "choice-unknown", f"No case's name contains {' or '.join(only)}. Change --only, or remove it for all."
        )
    clock, console = Clock(device), Console(width=max(Console().width, 100))
    moves = bandwidth(clock)
    about = circumstances() | moves.about()
    show(console, about)
    fused = select("triton", device, torch.bfloat16) if device.type == "cuda" else TORCH
    if fused is TORCH:
        console.print("No GPU that runs the kernels: only their torch references are timed, at small sizes.")
    rows: list[Row] = []
    for case in chain([first], chosen):
        rows.append(noted(case, fused, clock, options.repeats))
        save(options.json, about, rows=[asdict(row) | {"ratios": row.ratios} for row in rows])
    console.print(table(rows, moves))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
