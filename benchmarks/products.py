"""Time the matrix products of a layer with few rows: a library's, a kernel's, the floor.

    python benchmarks/products.py --json products.json         # LLaDA-8B's four shapes at 1 to 256 rows
    python benchmarks/products.py --rows 32 --tiles            # the kernel in other tiles too
    python benchmarks/products.py --smoke                      # tiny, on the CPU: does it run?

These products read nine tenths of the bytes of a decoding step. `library` is torch's product (cuBLAS); `kernel` is the
kernel of 8-bit weights (`kernels/linear.py`), which takes others too: up to 128 rows. Each is replayed in a CUDA graph
of many calls, every call with a weight of its own, a gigabyte in all (`clocks.py`). `floor`: the longer of the weight,
inputs and outputs at the bandwidth of reading and of the operations at the rate of a large product, both measured in
the same process; from some 200 rows on the second one is longer. `layer`: the four together, where all four were
measured.
"""

# pyright: reportCallIssue=false
# It knows nothing of the options of a kernel's launch.

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from circumstances import attempt, circumstances, save, show
from clocks import Bandwidth, Clock, bandwidth, peak, size
from options import add_json, add_smoke, check_gpu, command, numbers, parsed, parser, positive
from rich.console import Console
from torch import Tensor

SHAPES = {"qkv": (12288, 4096), "o": (4096, 4096), "gate up": (24576, 4096), "down": (4096, 12288)}  # outputs, inputs
TINY = {"qkv": (192, 64), "o": (64, 64), "gate up": (256, 64), "down": (64, 128)}
MANY = 128  # rows that the kernel takes
TOLERANCE = 0.01  # of the norm: more is a wrong answer, which has no figure
# Outputs and inputs of a tile, stages, warps; `--tiles` tries each of them.
TILES = [(16, 256, 3, 4), (16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 3, 4), (64, 128, 3, 4), (64, 64, 5, 4)]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Row:
    """One product by one side; seconds."""

    shape: str
    rows: int
    side: str
    moved: int
    floor: float
    seconds: list[float] = field(default_factory=list)
    note: str = ""


def kernel(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` by the kernel of 8-bit weights, as it chooses its tiles."""
    from dllm_sampler.kernels.linear import linear

    return linear(x, weight, _ones(weight))


def tiled(tile: tuple[int, int, int, int], x: Tensor, weight: Tensor) -> Tensor:
    """The same in a tile of `TILES`."""
    from dllm_sampler.kernels import linear

    (tall, deep, stages, warps), (outputs, inputs), rows = tile, weight.shape, len(x)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    lines = min(64, max(16, 1 << (rows - 1).bit_length()))
    linear.linear_kernel[-(-rows // lines), -(-outputs // tall)](
        x, weight, _ones(weight), None, out, rows, x.stride(0), outputs, inputs, lines, tall, deep, False,
        num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


_SCALES: dict[tuple[int, torch.device], Tensor] = {}


def _ones(weight: Tensor) -> Tensor:
    """Return a scale of 1 for each output: made once, or a recording would fill it in every call."""
    key = len(weight), weight.device
    if key not in _SCALES:
        _SCALES[key] = torch.ones(len(weight), device=weight.device)
    return _SCALES[key]


def sides(rows: int, tiles: bool, gpu: bool) -> Iterator[tuple[str, Product]]:
    """Names and products of what can be measured."""
    yield "library", F.linear
    if gpu and rows <= MANY:
        yield "kernel", kernel
        for tile in TILES if tiles else ():
            yield " ".join(map(str, tile)), partial(tiled, tile)


@dataclass(frozen=True)
class Limits:
    """The GPU's best measured rates."""

    moves: Bandwidth
    most: float  # operations per second of a large product

    def floor(self, moved: int, operations: float) -> float:
        """Seconds for that many bytes and operations: the two overlap, so the longer counts."""
        return max(moved / self.moves.read, operations / self.most)


def dtype_of(clock: Clock) -> torch.dtype:
    """Return the dtype of the products."""
    return torch.bfloat16 if clock.gpu else torch.float32


def measure(
    name: str, shape: tuple[int, int], rows: int, limits: Limits, clock: Clock, options: argparse.Namespace
) -> Iterator[Row]:
    """Every side of one product."""
    dtype = dtype_of(clock)
    (outputs, inputs), x = shape, torch.randn(rows, shape[1], device=clock.device, dtype=dtype)
    first = torch.randn(shape, device=clock.device, dtype=dtype) / inputs**0.5
    weights = [first, *(first.clone() for _ in range(clock.copies(size(first)) - 1))]
    moved = size(first, x) + rows * outputs * x.element_size()
    for side, product in sides(rows, options.tiles, clock.gpu):
        row = Row(name, rows, side, moved, limits.floor(moved, 2.0 * rows * outputs * inputs))

        def run(row: Row = row, product: Product = product) -> None:
            error = float((product(x, first).double() - F.linear(x, first).double()).norm())
            if not error <= TOLERANCE * float(F.linear(x, first).double().norm()):
                raise RuntimeError("the result differs from the library's")
            timer = clock.replayed([partial(product, x, weight) for weight in weights])
            row.seconds += [timer() for _ in range(options.repeats)]

        row.note = attempt(run)[1]
        yield row if not row.note else Row(name, rows, side, moved, row.floor, note=row.note)


def layers(found: Sequence[Row]) -> Iterator[Row]:
    """The four products of a layer together, by rows and side."""
    for rows, side in dict.fromkeys((row.rows, row.side) for row in found):
        each = [row for row in found if (row.rows, row.side) == (rows, side) and row.seconds]
        if len(each) == len(SHAPES):
            together = [sum(seconds, 0.0) for seconds in zip(*(row.seconds for row in each), strict=True)]
            yield Row("layer", rows, side, sum(row.moved for row in each), sum(row.floor for row in each), together)


def said(row: Row) -> str:
    """A row as people read it."""
    head = f"{row.shape:>8}  {row.rows:>4} rows  {row.side:<16}"
    if not row.seconds:
        return f"{head}  {row.note}"
    ours = statistics.median(row.seconds)
    spread = f"{min(row.seconds) * 1e6:.2f} to {max(row.seconds) * 1e6:.2f}"
    return f"{head}  {ours * 1e6:9.2f} us ({spread}), {ours / row.floor:.2f} x the floor of {row.floor * 1e6:.2f}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--rows", type=numbers, default="32,1,8,16,64,128,256", help="rows of the inputs (default %(default)s)")
    add("--tiles", action="store_true", help="measure the kernel with other tiles, too")
    add("--repeats", type=positive, default=5, help="replays of a graph (default %(default)s)")
    add_json(it)
    add_smoke(it)
    options = parsed(it, argv, rows="1,4", repeats=1)
    check_gpu(it, options)
    return options


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    clock = Clock(torch.device("cpu" if options.smoke else "cuda"))
    limits = Limits(bandwidth(clock), peak(clock, dtype_of(clock)))
    about = circumstances() | limits.moves.about() | {"product TFLOP/s": round(limits.most / 1e12, 3)}
    show(Console(), about)
    found: list[Row] = []
    for rows in options.rows:
        for name, shape in (TINY if options.smoke else SHAPES).items():
            for row in measure(name, shape, rows, limits, clock, options):
                found.append(row)
                print(said(row), flush=True)
                save(options.json, about, rows=[asdict(one) for one in (*found, *layers(found))])
        for row in layers([row for row in found if row.rows == rows]):
            print(said(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
