"""How many steps of a stream of prompts are replays, and how many run as always because their shape is new.

    python benchmarks/recordings.py
    python benchmarks/recordings.py --grain 1 --kept 1       # exactly equal canvases alone share recordings
    python benchmarks/recordings.py --schedulers threshold --caches dual --prompts 200

Prompts of random lengths, one after the other, batch 1, on an untrained model. Nothing is recorded: the first step of a
key (`graphs.py`) counts as run as always, the second as recorded, each later one as replayed. The counts are the same
on every machine.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Hashable, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from circumstances import circumstances, show
from options import among, check_recorded, command, parser
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dllm_sampler import config, graphs
from dllm_sampler.canvas import Canvas
from dllm_sampler.eval.arguments import positive
from dllm_sampler.eval.untrained import llada
from dllm_sampler.graphs import InPlace, StaticEngine
from dllm_sampler.sampler import Sampler

BLOCK = 32


class Met(dict[Hashable, Any]):
    """The steps of some buffers, counting how often each is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[Hashable] = Counter()

    def get(self, key: Hashable, default: Any = None) -> Any:
        self.times[key] += 1
        return super().get(key, default)


class Counting(StaticEngine):
    """Runs each step as always, and remembers which it met."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.met: list[Met] = []

    def begin(self, canvas: Canvas) -> Any:
        state = super().begin(canvas)
        assert isinstance(state, InPlace)
        if not isinstance(state.buffers.steps, Met):
            state.buffers.steps = Met()
            self.met.append(state.buffers.steps)
        return state


def sampler(scheduler: str, cache: str, layers: int = 2) -> Sampler:
    """On an untrained model, which is not sure of anything: so its threshold is for some four tokens a step.

    Raises:
        UserError: its steps are never recorded.
    """
    rule = {"name": scheduler} | ({"threshold": 0.08} if scheduler == "threshold" else {})
    blocks = {"name": "fixed", "length": BLOCK}
    it = Sampler(llada(640, 64, 128, layers, 4), scheduler=rule, cache=cache, blocks=blocks)
    check_recorded(it)
    return it


def counts(it: Sampler, lengths: Sequence[int], tokens: int, grain: int) -> list[int]:
    """Steps that ran as always, that were recorded, and that were replayed."""
    engine = Counting(it.denoiser, it.plugins, 1)
    with patch.object(Sampler, "_engine", lambda *_: engine), patch.object(Counting, "grain", grain):
        for number, length in enumerate(lengths):
            it.generate([[5 + number % 600] * length], max_new_tokens=tokens, seed=number)
    times = [number for met in engine.met for number in met.times.values()]
    twice = sum(number > 1 for number in times)
    return [len(times), twice, sum(times) - len(times) - twice]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers, caches = (among(kind, config.names(kind)) for kind in ("scheduler", "cache"))
    add("--schedulers", type=schedulers, default="fixed,threshold", help="which (default %(default)s)")
    add("--caches", type=caches, default="none,prefix,dual", help="under each of these (default %(default)s)")
    add("--prompts", type=positive, default=60, help="how many (default %(default)s)")
    add("--shortest", type=positive, default=60, help="tokens of a prompt, at least (default %(default)s)")
    add("--longest", type=positive, default=300, help="and at most (default %(default)s)")
    add("--tokens", type=positive, default=128, help="new ones (default %(default)s)")
    add("--grain", type=positive, default=StaticEngine.grain, help="of a canvas (default %(default)s)")
    add("--kept", type=positive, default=graphs.KEPT, help="shapes that are kept (default %(default)s)")
    options = it.parse_args(argv)
    if options.longest < options.shortest:
        it.error(f"--longest {options.longest}: should be at least --shortest {options.shortest}")
    return options


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    random = Random(0)
    lengths = [random.randint(options.shortest, options.longest) for _ in range(options.prompts)]
    out = Table(title=f"steps of {options.prompts} generations")
    for name in ("scheduler", "cache", "as always", "recorded", "replayed", "share"):
        out.add_column(name, justify="left" if name in ("scheduler", "cache") else "right")
    samplers = {(one, cache): sampler(one, cache) for one in options.schedulers for cache in options.caches}
    with patch.object(graphs, "KEPT", options.kept):
        for names, it in track(samplers.items(), "recordings", console=Console(stderr=True), transient=True):
            found = counts(it, lengths, options.tokens, options.grain)
            out.add_row(*names, *map(str, found), f"{found[-1] / sum(found):.0%}")
    console = Console()
    show(console, circumstances())
    console.print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
