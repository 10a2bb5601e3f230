"""How long a GPU would wait for the host between two recorded steps: from what it told the host to the next replay.

    python benchmarks/host_gap.py
    python benchmarks/host_gap.py --schedulers threshold,klass --layers 32

Where the host must know how a step ended before it can send the next one (a threshold under a cache that stores), the
device has nothing to do meanwhile. Measured without a GPU: the model is tiny, a replay is a pause of 2 ms, and the
clock runs on the host alone. Launching the graph and the transfer come on top on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from circumstances import circumstances, show
from options import among, check_recorded, command, parser
from rich.console import Console
from rich.table import Table

from dllm_sampler import config, layout
from dllm_sampler.errors import UserError
from dllm_sampler.eval.arguments import positive
from dllm_sampler.eval.untrained import llada
from dllm_sampler.graphs import StaticEngine
from dllm_sampler.noise import CounterNoise
from dllm_sampler.sampler import Sampler

PAUSE = 0.002


class Watched(StaticEngine):
    """Takes the time between the end of the wait for the device and the next replay."""

    def __init__(self, *given: Any):
        super().__init__(*given, record=self._pause)
        self.read: float | None = None
        self.gaps: list[float] = []

    def _pause(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            if self.read is not None:
                self.gaps.append(time.perf_counter() - self.read)
            self.read = None
            time.sleep(PAUSE)

        return replay

    def _read(self, state: Any, measured: list[int]) -> layout.Found:
        self.read = time.perf_counter()
        return super()._read(state, measured)


@torch.no_grad()
def gaps(scheduler: dict[str, Any], cache: str, layers: int, steps: int) -> list[float]:
    """Seconds, one per step that was replayed."""
    blocks = {"name": "fixed", "length": 32}
    it = Sampler(llada(640, 64, 128, layers, 4), scheduler=scheduler, cache=cache, blocks=blocks)
    check_recorded(it)
    engine = Watched(it.denoiser, it.plugins, 1)
    given = [[5] * 12, [6] * 16], 64, [0, 1]
    canvas = layout.canvas(*given, it.denoiser.spec, it.plugins.blocks, CounterNoise(), it.plugins.stop.cuts)
    state = engine.begin(canvas)
    for step in range(1, steps + 1):
        engine.step(state)
        engine.poll(state, step)
    return engine.gaps


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers, caches = (among(kind, config.names(kind)) for kind in ("scheduler", "cache"))
    add("--schedulers", type=schedulers, default="threshold,klass,localleap", help="which (default %(default)s)")
    add("--caches", type=caches, default="prefix,dual", help="under each of these (default %(default)s)")
    add("--layers", type=positive, default=32, help="of the model (default %(default)s)")
    add("--steps", type=positive, default=200, help="of a generation, at least 4 (default %(default)s)")
    options = it.parse_args(argv)
    if options.steps < 4:
        it.error(f"--steps {options.steps}: should be at least 4, the first two are no replays")
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = Table(title="microseconds between two replays: median (lowest to highest tenth)")
    for name in ("scheduler", "cache", "microseconds"):
        out.add_column(name)
    for scheduler in options.schedulers:
        for cache in options.caches:
            rule = {"name": scheduler} | ({"threshold": 2.0} if scheduler == "threshold" else {})
            found = [1e6 * seconds for seconds in gaps(rule, cache, options.layers, options.steps)]
            if len(found) < 2:
                raise UserError(f"{options.steps} steps of {scheduler} replayed {len(found)}: it takes more --steps")
            low, *_, high = statistics.quantiles(found, n=10, method="inclusive")
            out.add_row(scheduler, cache, f"{statistics.median(found):.0f} ({low:.0f} to {high:.0f})")
    console = Console()
    show(console, circumstances())
    console.print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
