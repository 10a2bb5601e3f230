"""How many tensor operations a step makes beside the model, by part: each is a launch, or a node of a CUDA graph.

    python benchmarks/step_operations.py
    python benchmarks/step_operations.py --schedulers threshold --caches dual --stops none,prefix
    python benchmarks/step_operations.py --backend triton

Counted on a CPU in a step in the middle of a block, as a recorded step makes it (`graphs.py`). Views are not counted,
and a GPU may take several launches for one operation (a sort, say). `readout` is torch's, which a kernel may replace:
it is not counted with `--backend triton`, where all that has a kernel is one operation, its launch. `measure` is what
the host asks for where the schedule does not fix the next sizes, `home` the copies that bring a step's outcome to its
place. The counts are the same on every machine: `tests/contract/test_overhead.py` holds them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from circumstances import circumstances, show
from options import among, command, parser
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler import bookkeeping, config, launches, layout, readout
from dllm_sampler.buffers import Buffers
from dllm_sampler.canvas import Canvas
from dllm_sampler.eval.untrained import llada
from dllm_sampler.graphs import StaticEngine
from dllm_sampler.kernels import reference
from dllm_sampler.kernels.backend import TORCH, Backend, StepKernels
from dllm_sampler.loop import Engine
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.noise import CounterNoise
from dllm_sampler.plugins import Plugins
from dllm_sampler.sampler import Sampler
from dllm_sampler.trace import Recorder

DECIDING = ("ask", "narrow", "plan", "readout", "open", "tell", "stop")
DOING = ("apply", "observe", "record", "close", "advance", "loop", "measure", "home")
PARTS = DECIDING + DOING
BLOCK, PROMPTS = 16, [[5] * 12, [6] * 16]


class Operations(TorchDispatchMode):
    """Counts tensor operations other than views, under the name of the outermost part that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.part: list[str] = ["loop"]
        self.silent = False  # inside what is a single launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[self.part[-1]] += not (func.is_view or self.silent)
        return func(*args, **(kwargs or {}))

    def counts(self, run: Callable[..., Any], number: int = 1) -> Callable[..., Any]:
        """The same function, counted as `number` operations."""

        @wraps(run)
        def launch(*args: Any, **options: Any) -> Any:
            before, self.silent = self.silent, True
            try:
                with launches.by(None):
                    return run(*args, **options)
            finally:
                self.silent = before
                self.found[self.part[-1]] += 0 if before else number

        return launch

    def kernels(self) -> Backend:
        """Triton's backend as it counts: torch's functions in place of its kernels."""
        others = {
            "choose": self.counts(reference.choose),
            "drift": self.counts(launches.torchs(readout.drift), 2),
        }
        names = [one.name for one in fields(StepKernels) if one.name not in others]
        plain = {name: self.counts(launches.torchs(getattr(bookkeeping, name))) for name in names}
        return replace(TORCH, name="triton", step=StepKernels(**others, **plain))

    def under(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose operations count for `part`; the model never counts for another."""

        @wraps(run)
        def named(*args: Any, **options: Any) -> Any:
            self.part.append(part if part == "model" or len(self.part) == 1 else self.part[-1])
            try:
                return run(*args, **options)
            finally:
                self.part.pop()

        return named


def _home(owner: Any, name: str) -> Any:
    return next((one for one in owner.__mro__ if name in vars(one)), owner) if isinstance(owner, type) else owner


@contextmanager
def counted(seen: Operations, p: Plugins) -> Iterator[None]:
    """Count what a step does, by part."""
    places: list[tuple[Any, str, str]] = [
        *((type(p.scheduler), name, name) for name in ("ask", "tell")),
        *((type(p.cache), name, name) for name in ("narrow", "plan", "observe")),
        *((TransformerDenoiser, name, "model") for name in ("__call__", "head")),
        *((Canvas, name, part) for name, part in {"apply": "apply", "commit": "apply", "advance": "advance"}.items()),
        (readout, "predict", "readout"),
        (type(p.blocks), "open", "open"),
        (type(p.stop), "__call__", "stop"),
        (Recorder, "note", "record"),
        (type(p.blocks), "close", "close"),
        (Engine, "measure", "measure"),
        (bookkeeping, "ended", "measure"),
        (Buffers, "settle", "home"),
    ]
    # Where a method is defined: some plug-ins look whether theirs is the default.
    places = [(_home(owner, name), name, part) for owner, name, part in places]
    patches = [patch.object(owner, name, seen.under(part, getattr(owner, name))) for owner, name, part in places]
    for one in patches:
        one.start()
    try:
        with seen:
            yield
    finally:
        for one in patches:
            one.stop()


class Unrecorded(StaticEngine):
    """Makes every step as the one that is recorded, and records none."""

    def _recorded(self, state: Any, record: Any, numbers: Any) -> None:
        return None


@torch.no_grad()
def operations(scheduler: object, cache: object, stop: object, backend: str = "torch") -> Counter[str]:
    """What the fourth step of a block takes, by part."""
    seen = Operations()
    denoiser = llada(640, 64, 128, 2, 4)
    blocks = {"name": "fixed", "length": BLOCK}
    it = Sampler(denoiser, scheduler=scheduler, cache=cache, stop=stop, blocks=blocks)
    p = it.plugins
    engine = Unrecorded(
        it.denoiser, p, 1, seen.kernels() if backend == "triton" else TORCH, record=lambda run, wanted=None: run
    )
    canvas = layout.canvas(PROMPTS, 2 * BLOCK, [0, 1], denoiser.spec, p.blocks, CounterNoise(), p.stop.cuts)
    state = engine.begin(canvas)
    for step in range(1, 4):
        engine.step(state)
        engine.poll(state, step)
    seen.found.clear()
    with counted(seen, p):
        engine.step(state)
    if backend == "triton":
        del seen.found["readout"]  # two launches, or three, instead
    return seen.found


def outside(found: Counter[str]) -> int:
    """All that is not the model."""
    return sum(number for part, number in found.items() if part != "model")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers, caches, stops = (among(kind, config.names(kind)) for kind in ("scheduler", "cache", "stop"))
    add("--schedulers", type=schedulers, default="threshold,fixed,klass", help="which (default %(default)s)")
    add("--caches", type=caches, default="none,prefix,dual", help="under each of these (default %(default)s)")
    add("--stops", type=stops, default="none,prefix", help="and with each of these (default %(default)s)")
    add("--backend", choices=("torch", "triton"), default="torch", help="whose operations (default %(default)s)")
    return it.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = Table(title="tensor operations of a step beside the model")
    for name in ("scheduler", "cache", "stop", *PARTS, "all"):
        out.add_column(name, justify="right" if name in (*PARTS, "all") else "left")
    for scheduler in options.schedulers:
        for cache in options.caches:
            for stop in options.stops:
                rule = {"name": scheduler} | ({"threshold": 2.0} if scheduler == "threshold" else {})
                found = operations(rule, cache, stop, options.backend)
                out.add_row(scheduler, cache, stop, *(str(found[part]) for part in PARTS), str(outside(found)))
    console = Console(width=180)
    show(console, circumstances())
    console.print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
