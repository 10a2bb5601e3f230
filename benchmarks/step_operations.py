"""Number of tensor operations of a step besides the model, by part: each is a launch, or a node of a CUDA graph.

    python benchmarks/step_operations.py
    python benchmarks/step_operations.py --schedulers threshold --caches dual --stops none,prefix

Counted on a CPU in a step in the middle of a block, as a recorded step makes it (`graphs.py`). Views are not counted,
and a GPU may take several launches for one operation (for example a sort). The parts, in a step's order:

`pack`      which positions are computed and answered, and their tokens, up to the network.
`readout`   torch's. A GPU has a kernel instead.
`ask`, `narrow`, `measure`  what the next forward is asked for, what the cache computes of it, and how large that is.
`home`      copies that bring a step's outcome to its static buffers.
`loop`      what the loop does between them.

The counts are the same on every machine: `tests/contract/test_overhead.py` holds them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from circumstances import circumstances, show
from options import among, command, parser
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from untrained import llada

from dllm_sampler import config
from dllm_sampler.core import packing
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.engine import layout, readout
from dllm_sampler.engine.buffers import Buffers
from dllm_sampler.engine.graphs import StaticEngine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.sampler import Sampler

ANSWER = ("pack", "readout", "open", "tell", "progress", "stop", "apply", "observe", "record", "move", "advance")
PARTS = (*ANSWER, "ask", "narrow", "measure", "home", "loop")
BLOCK, PROMPTS = 16, [[5] * 12, [6] * 16]


class Operations(TorchDispatchMode):
    """Counts tensor operations other than views, under the name of the outermost part that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.part: list[str] = ["loop"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[self.part[-1]] += not func.is_view
        return func(*args, **(kwargs or {}))

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
        *((type(p.cache), name, part) for name, part in {"plan": "pack", "observe": "observe"}.items()),
        (TransformerDenoiser, "__call__", "pack"),
        *((owner, name, "model") for owner, name in ((Transformer, "forward"), (TransformerDenoiser, "head"))),
        (readout, "predict", "readout"),
        *((type(p.blocks), name, name) for name in ("open", "progress", "move")),
        (type(p.scheduler), "tell", "tell"),
        *((type(p.stop), name, "stop") for name in ("__call__", "positions")),
        *(
            (Canvas, name, part)
            for name, part in {"reject_nonfinite": "apply", "apply": "apply", "advance": "advance"}.items()
        ),
        (Recorder, "note", "record"),
        *((type(p.scheduler), name, "ask") for name in ("ask", "ahead")),
        *((type(p.cache), name, "narrow") for name in ("expect", "computes", "narrow")),
        *((owner, name, "narrow") for owner, name in ((packing, "answerable"), (Query, "join"))),
        (packing, "computable", "narrow"),
        (ForwardRequest, "of", "measure"),
        (packing, "measure", "measure"),
        (Buffers, "copy_in", "home"),
    ]
    places = [place for place in places if hasattr(place[0], place[1])]  # few schedulers plan, few caches foresee
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

    def _recorded(self, state: Any, record: Any) -> None:
        return None


@torch.no_grad()
def operations(scheduler: object, cache: object, stop: object) -> Counter[str]:
    """Count the operations of the fourth step of a block, by part."""
    seen = Operations()
    denoiser = llada(640, 64, 128, 2, 4)
    blocks = {"name": "fixed", "length": BLOCK}
    it = Sampler(denoiser, scheduler=scheduler, cache=cache, stop=stop, blocks=blocks)
    p = it.plugins
    engine = Unrecorded(it.denoiser, p, record=lambda run: run)
    canvas = layout.canvas(PROMPTS, 2 * BLOCK, [0, 1], denoiser.spec, p.blocks, CounterNoise(), p.stop.cuts)
    state = engine.begin(canvas)
    for _ in range(3):
        engine.step(state)
        engine.poll(state)
    seen.found.clear()
    with counted(seen, p):
        engine.step(state)
    return seen.found


def outside(found: Counter[str]) -> int:
    """All that is not the model."""
    return sum(number for part, number in found.items() if part != "model")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers, caches, stops = (among(kind, config.names(kind)) for kind in ("scheduler", "cache", "stop"))
    add(
        "--schedulers",
        type=schedulers,
        default="threshold,fixed,klass",
        help="schedulers to measure (default %(default)s)",
    )
    add("--caches", type=caches, default="none,prefix,dual", help="caches to measure each with (default %(default)s)")
    add("--stops", type=stops, default="none,prefix", help="stops to measure each with (default %(default)s)")
    return it.parse_args(argv)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = Table(title="tensor operations of a step besides the model")
    for name in ("scheduler", "cache", "stop", *PARTS, "all"):
        out.add_column(name, justify="right" if name in (*PARTS, "all") else "left")
    for scheduler in options.schedulers:
        for cache in options.caches:
            for stop in options.stops:
                rule = {"name": scheduler} | ({"threshold": 2.0} if scheduler == "threshold" else {})
                found = operations(rule, cache, stop)
                out.add_row(scheduler, cache, stop, *(str(found[part]) for part in PARTS), str(outside(found)))
    console = Console(width=180)
    show(console, circumstances())
    console.print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
