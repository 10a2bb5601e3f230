"""Ceilings of a GPU: bandwidth by copy and by read, a large product, one more node of a graph.

    python benchmarks/ceilings.py --json ceilings.json
    python benchmarks/ceilings.py --smoke                # tiny, on the CPU: does it run?

First come the versions, the driver with its clocks, and whether Triton's kernels can run there. Then:

`copy`     bytes read and written per second of a copy of a gigabyte
`read`     bytes per second of a kernel that reads the same and writes next to nothing: what the weights of a decoding
           step can reach at best
`product`  operations per second of a square matrix product
`node`     time of one more small operation in a CUDA graph, its gap included
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence

import torch
from circumstances import circumstances, save, show
from clocks import Clock, bandwidth, node, peak
from options import add_json, add_smoke, command, parsed, parser
from rich.console import Console

from dllm_sampler.kernels.backend import obstacle

DRIVER = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def driver() -> str:
    """Return the driver and clocks of the first GPU, by NVIDIA's tool."""
    if shutil.which("nvidia-smi") is None:
        return "not known: no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={DRIVER}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return (told.stdout or told.stderr).strip().partition("\n")[0]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add_json(it)
    add_smoke(it)
    return parsed(it, argv)


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    gpu = torch.cuda.is_available() and not options.smoke
    clock = Clock(torch.device("cuda" if gpu else "cpu"))
    console, about = Console(), circumstances(driver=driver())
    about["kernels"] = (gpu and obstacle(clock.device, torch.bfloat16)) or ("run" if gpu else "not measured: no GPU")
    show(console, about)
    found: dict[str, float] = {}

    def note(**figures: float) -> None:
        found.update(figures)
        show(console, {name: f"{value:.4g}" for name, value in figures.items()})
        save(options.json, about, figures=found)

    moved = bandwidth(clock)
    note(copy=moved.copy, read=moved.read)
    note(node=node(clock))
    note(product=peak(clock, torch.bfloat16 if gpu else torch.float32))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
