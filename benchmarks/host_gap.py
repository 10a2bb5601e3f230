"""How often a GPU would wait for the host between two recorded steps, and how long each time.

    python benchmarks/host_gap.py
    python benchmarks/host_gap.py --schedulers threshold,klass --layers 32

Under a cache that stores, what a threshold committed decides how large the next step is. The host either waits until it
knows (`waiting`), or sends a recording of each kind of step that may be next, which do nothing where they are not right
(`ahead`: `capture.chooses`, on NVIDIA GPUs): then it waits only where none is recorded, after the last step that is
allowed, and where none was right, `in vain`. Generations of an untrained model, batch 1, counted once the first ones
have recorded their steps; the counts do not hang on how fast the machine is. `microseconds` are from the end of such a
wait to the next replay, on the host's clock: median, lowest and highest tenth. Launching a graph, the transfer, and
what a step in vain costs come on top on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from circumstances import circumstances, show
from options import among, command, parser
from recordings import sampler
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.canvas import Canvas, Sizes
from dllm_sampler.eval.arguments import positive
from dllm_sampler.graphs import InPlace, StaticEngine
from dllm_sampler.loop import State
from dllm_sampler.sampler import Sampler


class Watched(StaticEngine):
    """Replays by making the step again, and counts."""

    def __init__(self, it: Sampler, chooses: bool):
        super().__init__(it.denoiser, it.plugins, 1, record=self._remade, chooses=chooses)
        self.waited: float | None = None  # when the device last had nothing to do
        self.clear()

    def clear(self) -> None:
        self.gaps: list[float] = []
        self.waits = self.vain = 0

    def begin(self, canvas: Canvas) -> State:
        self.waited = None
        return super().begin(canvas)

    def step(self, state: State) -> None:
        self.running, self.made = state, False
        super().step(state)
        self.vain += isinstance(state, InPlace) and len(state.sent) > 0 and not self.made
        self.waited = None  # also where it was no replay

    def _remade(self, run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], None]:
        run()
        self.waited = None  # recording took most of it
        begun = [True]  # the first replay has happened
        sizes = self.running.canvas.sizes

        def replay() -> None:
            if self.waited is not None:
                self.gaps.append(time.perf_counter() - self.waited)
            self.waited = None
            if begun:
                begun.clear()
            elif wanted is None or bool(wanted()):
                self.made = True
                self._resize(self.running, sizes)
                assert isinstance(self.running, InPlace)
                self._measured(self.running)

        return replay

    def _look(self, state: State, known: Sizes | None) -> list[int]:
        self.waits += 1
        return super()._look(state, known)

    def _read(self, state: State, measured: list[int]) -> Any:
        self.waited = time.perf_counter()
        return super()._read(state, measured)

    def _guess(self, state: InPlace) -> bool:
        guessed = super()._guess(state)
        if guessed:
            self.waited = None  # the next step is sent before this one ends
        return guessed


@torch.no_grad()
def watched(it: Sampler, chooses: bool, generations: int) -> tuple[int, Watched]:
    """Forwards that were made, and what was seen of them."""
    engine, forwards = Watched(it, chooses), 0
    with patch.object(Sampler, "_engine", lambda *_: engine):
        for number in range(2 * generations):
            if number == generations:
                engine.clear()
            found = it.generate([[5 + number % generations] * 40], max_new_tokens=128, seed=number % generations)
            forwards += int(found.nfe) * (number >= generations)
    return forwards, engine


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers, caches = (among(kind, config.names(kind)) for kind in ("scheduler", "cache"))
    add("--schedulers", type=schedulers, default="threshold,klass,localleap", help="which (default %(default)s)")
    add("--caches", type=caches, default="prefix,dual", help="under each of these (default %(default)s)")
    add("--layers", type=positive, default=32, help="of the model (default %(default)s)")
    add("--generations", type=positive, default=4, help="that are counted, after as many others (default %(default)s)")
    return it.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = Table(title="how often the device waits for the host")
    for name in ("scheduler", "cache", "host", "forwards", "waits", "in vain", "microseconds"):
        out.add_column(name, justify="left" if name in ("scheduler", "cache", "host") else "right")
    samplers = [
        (one, cache, sampler(one, cache, options.layers)) for one in options.schedulers for cache in options.caches
    ]
    for *names, it in track(samplers, "host", console=Console(stderr=True), transient=True):
        for chooses in (False, True):
            forwards, seen = watched(it, chooses, options.generations)
            gaps = [1e6 * seconds for seconds in seen.gaps]
            low, *_, high = statistics.quantiles(gaps, n=10, method="inclusive") if len(gaps) > 1 else [0.0, 0.0]
            time_ = f"{statistics.median(gaps):.0f} ({low:.0f} to {high:.0f})" if len(gaps) > 1 else "-"
            host = "ahead" if chooses else "waiting"
            out.add_row(*names, host, *map(str, (forwards, seen.waits, seen.vain)), time_)
    console = Console()
    show(console, circumstances())
    console.print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
