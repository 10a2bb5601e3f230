"""How fast each kernel is, compared with its torch reference and with a copy of the bytes that it must move.

    python benchmarks/kernels.py                        # on a GPU
    python benchmarks/kernels.py --smoke                # tiny sizes, once: does it run?
    python benchmarks/kernels.py --only readout --json kernels.json

Measured in turns, kernel and reference, with the caches emptied before each call:

`ratio`     time of the reference over time of the kernel, the median of the repeats with its range.
`of copy`   the bytes a kernel cannot avoid (inputs once, outputs once), over its time, over the bandwidth of a copy
            measured in the same process. 100 %: as fast as memory allows.

A kernel that fails or falls back to torch says so in its line. Each line is in `--json` as soon as it is measured.
Without a GPU there is no figure for a kernel: then only the references are timed, on the CPU, at small sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from circumstances import attempt, circumstances, show
from options import command, parsed, parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dllm_sampler.core import files
from dllm_sampler.errors import UserError
from dllm_sampler.eval.arguments import output, positive
from dllm_sampler.kernels.backend import TORCH, Backend, LayerKernels, select
from dllm_sampler.kernels.sampling import Sampling

Call = Callable[[Backend], Any]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    run: Call
    moved: int  # bytes that cannot be avoided


@dataclass
class Row:
    """What was measured; seconds per call, one per repeat."""

    name: str
    moved: int
    kernel: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.kernel, self.reference, strict=False)]


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def samplings(rows: int, vocab: int, device: torch.device) -> dict[str, Sampling]:
    """The best token of each row, and a draw at a temperature; the last token is the mask."""
    keys = torch.randint(2**62, (rows,), device=device)
    return {"greedy": Sampling(vocab - 1), "draw": Sampling(vocab - 1, 0.7, keys=keys)}


def readouts(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> Iterator[Case]:
    """A greedy choice and a draw at a temperature."""
    logits = torch.randn(rows, vocab, device=device, dtype=dtype) * 4
    for what, sampling in samplings(rows, vocab, device).items():

        def run(it: Backend, sampling: Sampling = sampling) -> Any:
            return it.readout(logits, sampling)

        yield Case(f"readout {rows} x {vocab} {what}", run, size(logits))


def heads(device: torch.device, dtype: torch.dtype, rows: int, vocab: int, width: int) -> Iterator[Case]:
    """The head of a model for a window's masks, and a library's product whose logits are stored and read."""
    hidden = torch.randn(4 * rows, width, device=device, dtype=dtype)
    weight = torch.randn(vocab, width, device=device, dtype=dtype) / width**0.5
    index = torch.arange(0, 4 * rows, 4, device=device)
    for what, sampling in samplings(rows, vocab, device).items():

        def run(it: Backend, sampling: Sampling = sampling) -> Any:
            return it.head(hidden, weight, sampling, index=index)

        def apart(it: Backend, sampling: Sampling = sampling) -> Any:
            return it.readout(torch.nn.functional.linear(hidden.index_select(0, index), weight), sampling)

        for name, how in {"head": run, "head stored": apart}.items():
            yield Case(f"{name} {rows} x {width} x {vocab} {what}", how, size(weight, hidden[:rows]))


def layers(
    device: torch.device, dtype: torch.dtype, rows: int, window: int, slots: int, heads: int, kv_heads: int, head: int
) -> Iterator[Case]:
    """The parts of a layer, for the last `window` columns of rows of `slots`; the feed-forward is thrice the stream."""
    if importlib.util.find_spec("triton") is None:  # their modules import it, and hold the references too
        return
    from dllm_sampler.kernels import attention, linear, norm, rope, swiglu

    plain = LayerKernels(
        attention.attention_reference,
        linear.linear_reference,
        norm.norm_reference,
        rope.qkv_rope_reference,
        swiglu.swiglu_reference,
    )

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    width, entries = heads * head, rows * window
    hidden, delta, weight = normal(entries, width), normal(entries, width), normal(width)
    fused, gate = normal(entries, (heads + 2 * kv_heads) * head), normal(entries, 6 * width)
    angles = normal(entries, head // 2, dtype=torch.float32)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    q, keys, values = normal(entries, heads, head), *(normal(rows, slots + 1, kv_heads, head) for _ in range(2))
    k, v = (normal(entries, kv_heads, head) for _ in range(2))
    bounds = torch.arange(rows + 1, device=device) * window
    at = torch.arange(slots - window, slots, device=device).repeat(rows)
    places = torch.arange(entries, device=device) // window * (slots + 1) + at
    overwritten = torch.zeros(rows, slots + 1, dtype=torch.bool, device=device)
    overwritten[:, slots - window : slots] = True
    half = torch.full((rows,), slots // 2, device=device)
    numbers = torch.randint(-127, 128, (6 * width, width), device=device, dtype=torch.int8)
    scale = torch.rand(6 * width, device=device)

    def attend(its: LayerKernels, *fresh: Tensor, **given: Any) -> Tensor:
        own = fresh or (None, None)
        return its.attention(q, *own, (keys, values), bounds, at, longest=window, **given)

    runs: dict[str, tuple[Callable[[LayerKernels], Any], int]] = {
        "attention": (attend, size(q, q, keys, values)),
        "attention half visible": (
            lambda its: attend(its, end=half),
            size(q, q) + size(keys, values) // 2,
        ),
        "attention fresh keys": (  # in place of the stored ones
            lambda its: attend(its, k, v, overwritten=overwritten),
            size(q, q, keys, values),
        ),
        "attention blocks of 32": (lambda its: attend(its, grid=32), size(q, q, keys, values)),
        "norm": (lambda its: its.norm(hidden, weight, 1e-5, delta), 4 * size(hidden)),
        "qkv_rope": (
            lambda its: its.qkv_rope(
                fused, cos, sin, heads, kv_heads, slots=(keys, values), places=places, fresh=False
            ),
            size(fused, fused, cos, sin),
        ),
        "swiglu": (lambda its: its.swiglu(gate), size(gate) * 3 // 2),
    }
    if entries <= linear.MANY:  # with more the kernel is its reference
        moved = size(hidden, numbers, scale) + entries * len(scale) * hidden.element_size()
        runs["linear int8"] = lambda its: its.linear(hidden, numbers, scale), moved
    for name, (run, moved) in runs.items():
        shape = f"{rows} x {window} of {slots}, heads {heads}/{kv_heads} of {head}"
        yield Case(f"{name} {shape}", lambda it, run=run: run(it.layer or plain), moved)


def cases(device: torch.device, smoke: bool) -> Iterator[Case]:
    """On a GPU the sizes of LLaDA-8B and Dream-7B, on a CPU and for a smoke run small ones."""
    if smoke or device.type == "cpu":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        rows, vocab = (4, 1000) if smoke else (32, 16384)
        yield from readouts(device, dtype, rows, vocab)
        yield from heads(device, dtype, rows, vocab, 64 if smoke else 512)
        yield from layers(device, dtype, 2, 8, 64 if smoke else 512, 4, 2, 64)
        return
    for rows in (1, 32, 1024):
        yield from readouts(device, torch.bfloat16, rows, 126464)
    for rows in (16, 64, 256, 1024):
        yield from heads(device, torch.bfloat16, rows, 126464, 4096)
        yield from heads(device, torch.bfloat16, rows, 152064, 3584)
    for rows, window in ((1, 8), (1, 32), (1, 256), (1, 1024), (16, 32)):
        yield from layers(device, torch.bfloat16, rows, window, 1024, 32, 32, 128)
        yield from layers(device, torch.bfloat16, rows, window, 1024, 28, 4, 128)


FLUSHES = 16  # about a millisecond on a GPU, in which the host is through with the launches of what is timed


class Clock:
    """Seconds of a call on the device, with cold caches."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = torch.empty(2**26 if device.type == "cuda" else 2**20, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        for _ in range(FLUSHES if self.device.type == "cuda" else 1):
            self.flush.zero_()
        if self.device.type == "cpu":
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def bandwidth(clock: Clock, count: int) -> float:
    """Bytes per second of a copy, read and written ones counted."""
    source = torch.ones(count, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size(source) / statistics.median(clock(lambda: target.copy_(source)) for _ in range(10))


def noted(case: Case, fused: Backend, clock: Clock, repeats: int, inner: int) -> Row:
    """What was measured; nothing of a kernel that failed, or whose work torch did."""
    row, note = attempt(lambda: measure(case, fused, clock, repeats, inner))
    row = row or Row(case.name, case.moved)
    return replace(row, kernel=[], note=note) if note else row


def measure(case: Case, fused: Backend, clock: Clock, repeats: int, inner: int) -> Row:
    """Kernel and reference in turns; a repeat is the median of `inner` calls."""
    row = Row(case.name, case.moved)
    sides = [(row.reference, TORCH)] + ([] if fused is TORCH else [(row.kernel, fused)])
    for _, it in sides:  # compiles
        case.run(it)
    for _ in range(repeats):
        for seconds, it in sides:
            seconds.append(statistics.median(clock(lambda it=it: case.run(it)) for _ in range(inner)))
    return row


def table(rows: list[Row], copied: float) -> Table:
    out = Table(title="median of the repeats (lowest to highest)")
    out.add_column("case")
    for name in ("kernel us", "torch us", "ratio", "spread", "of copy", ""):
        out.add_column(name, justify="right")
    for row in rows:
        torchs = f"{statistics.median(row.reference) * 1e6:.1f}" if row.reference else ""
        cells = ["not measured", torchs, "", "", "", row.note]
        if row.kernel:
            ours = statistics.median(row.kernel)
            cells[0] = f"{ours * 1e6:.1f}"
            cells[2] = f"{statistics.median(row.ratios):.2f}"
            cells[3] = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
            cells[4] = f"{row.moved / ours / copied:.0%}"
        out.add_row(row.name, *cells)
    return out


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--only", default="", metavar="TEXT", help="cases whose name contains it (default: all)")
    add("--repeats", type=positive, default=7, help="measurements per ratio (default %(default)s)")
    add("--inner", type=positive, default=10, help="calls per measurement (default %(default)s)")
    add("--json", type=output, metavar="FILE", help="write every measurement there (default: nowhere)")
    add("--smoke", action="store_true", help="tiny sizes, once: does it run?")
    return parsed(it, argv, repeats=1, inner=1)


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = (case for case in cases(device, options.smoke) if options.only in case.name)
    first = next(chosen, None)
    if first is None:
        raise UserError(f"no case's name contains {options.only!r}: without --only the table has them all")
    clock, console = Clock(device), Console(width=max(Console().width, 100))
    copied = bandwidth(clock, 2**28 if device.type == "cuda" else 2**22)
    about = circumstances() | {"copy GB/s": round(copied / 1e9, 1)}
    show(console, about)
    fused = select("triton", device, torch.bfloat16) if device.type == "cuda" else TORCH
    if fused is TORCH:
        console.print("No GPU that runs the kernels: only their torch references are timed, at small sizes.")
    rows: list[Row] = []
    for case in chain([first], chosen):
        rows.append(noted(case, fused, clock, options.repeats, options.inner))
        if options.json:
            measured = [asdict(row) | {"ratios": row.ratios} for row in rows]
            files.write(options.json, json.dumps({"about": about, "rows": measured}, indent=1))
    console.print(table(rows, copied))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
