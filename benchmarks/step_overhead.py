"""Cost of a step of the loop beyond the model, and speed of sampling against a plain PyTorch loop.

    python benchmarks/step_overhead.py                            # mini and llada-157m, batch 1 and 8
    python benchmarks/step_overhead.py --models llada-157m --batch 1 --steps 32 --json overhead.json

Two ratios, both of alternating measurements in one process, each the median of the repeats with its range:

`overhead`  time of our step (query, plan, forward, readout, commit, poll) over the network alone: the same body rows,
            the same head rows, the same attention to the same stored keys. The rows are those our step asked for.
`speed`     tokens per second of `Sampler.generate` over those of `official_style.generate` on the same weights and
            schedule. Both must give the same tokens in the same number of forwards, or nothing is reported.
`official`  the same over the published code itself (`--official FILE`, see `official_code.py`), which knows no cache.

A third measures no ratio of ours to others:

`replay`    host time of a recorded step around a replay that does nothing, and its part between the look at the last
            step and the replay, in which a GPU has nothing to do. The ratio is the whole over that part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from unittest.mock import patch

import official_code
import official_style
import torch
from circumstances import circumstances, save, show
from options import accepted, add_json, add_smoke, among, command, numbers, parsed, parser, positive
from rich.console import Console
from rich.table import Table
from subjects import SIZES, Subject, check, subject
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.core import packing
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.engine import layout
from dllm_sampler.engine.graphs import StaticEngine
from dllm_sampler.engine.loop import Engine
from dllm_sampler.errors import UserError, counted
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer, Rope, Transformer, pick_rows

TARGETS = {  # for llada-157m
    ("overhead", "none"): 1.10,
    ("overhead", "dual"): 1.10,
    ("speed", "none"): 2.5,
    ("speed", "dual"): 1.4,
}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in seconds, a ratio per repeat."""

    model: str
    weights: str
    batch: int
    cache: str
    kind: str
    ours: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    target: float | None = None

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours, self.other, strict=True)
        return [its / mine if self.kind in ("speed", "official") else mine / its for mine, its in pairs]


@dataclass
class Spy:
    """Our denoiser, remembering what it was asked."""

    inner: TransformerDenoiser
    last: tuple[Query, Plan] | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        self.last = query, plan
        return self.inner(canvas, query, plan)

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)


class Bare:
    """The network alone: what no sampler can do without."""

    def __init__(self, network: Transformer, batch: int, columns: int, stores: bool):
        config, weight = network.config, network.embed.weight
        shape = (config.num_layers, 2, batch, config.num_kv_heads, columns, config.head_dim)
        self.network = network
        self.slots = torch.zeros(shape, dtype=weight.dtype, device=weight.device) if stores else None

    def prepare(self, canvas: Canvas, query: Query, plan: Plan) -> Callable[[], Tensor]:
        """The forward that answers our step's query on our step's rows, a run of columns equal in every row.

        Raises:
            UserError: the step computes other columns.
        """
        pack, batch, device = plan.pack, len(canvas.ids), canvas.ids.device
        run = None if pack is None or len(pack.column) % batch else pack.column.view(batch, -1)  # [B, M]
        first, last = (0, 0) if run is None else (int(run[0, 0]), int(run[0, -1]) + 1)
        positions = torch.arange(first, last, device=device)[None]
        if run is None or not torch.equal(run, positions.expand(batch, -1)) or not plan.head_rows.whole:
            raise UserError(
                "cache-incompatible",
                f"The last step with cache={named(plan.cache)} does not compute one run of columns in every row, as a"
                " bare forward does. Set fewer --steps, or --caches none,dual.",
            )
        ids, rows = canvas.ids[:, first:last].clone(), query.positions - first  # [B, Q]

        def drive(index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None) -> Tensor:
            assert self.slots is not None
            keys, values = self.slots[index]
            q, keys[:, :, first:last], values[:, :, first:last] = layer.qkv(hidden, rope)
            heads = layer.heads(q, keys, values).transpose(1, 2).flatten(2)
            hidden = pick_rows(hidden, rows) + layer.o_proj(pick_rows(heads, rows))
            return hidden + layer.mlp(hidden)

        def plain() -> Tensor:
            return self.network(ids, positions=positions, rows=rows)

        def driven() -> Tensor:
            return self.network.head(self.network(ids, positions=positions, rows=rows, drive=drive))

        return plain if self.slots is None else driven


REPLAYS = 500  # in one measurement
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Clock:
    """Seconds of a call, the device's work included."""

    now: Callable[[], float]
    device: torch.device

    def __call__(self, run: Callable[[], object]) -> float:
        self._wait()
        start = self.now()
        run()
        self._wait()
        return self.now() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def overhead(it: Subject, batch: int, cache: str, steps: int, clock: Clock) -> tuple[float, float]:
    """Seconds of one generation's steps and of the same forwards alone, step by step in turn."""
    sampler, spy = it.sampler(cache, steps), Spy(it.denoiser)
    plugins, spec = sampler.plugins, spy.spec
    canvas = layout.canvas(
        it.prompts(batch).tolist(), it.new_tokens, range(batch), spec, plugins.blocks, sampler.noise, cuts=False
    )
    engine = Engine(spy, plugins)
    state = engine.begin(canvas)
    bare = Bare(it.network, batch, canvas.length, plugins.cache.stores)
    ours = other = 0.0
    step = 0
    while not state.finished:
        step += 1
        before = state.canvas

        def advance() -> None:
            engine.step(state)
            engine.poll(state)

        ours += clock(advance)
        assert spy.last is not None
        other += clock(bare.prepare(before, *spy.last))
    assert step == steps, f"{step} steps instead of {steps}"
    return ours, other


def speed(
    it: Subject, batch: int, cache: str, steps: int, clock: Clock, official: Callable[..., Tensor] | None = None
) -> tuple[float, float]:
    """Seconds of one generation by our sampler and by the plain loop; refuses to compare different answers.

    official: the published code, in place of the plain loop
    """
    sampler, prompts = it.sampler(cache, steps), it.prompts(batch)
    result = tokens = forwards = None

    def ours() -> None:
        nonlocal result
        result = sampler.generate(prompts, max_new_tokens=it.new_tokens)

    def plain() -> None:
        nonlocal tokens, forwards
        assert it.denoiser.mask_id is not None
        given = it.network, prompts, it.new_tokens, it.block, steps, it.denoiser.mask_id
        if official is not None:
            tokens, forwards = official_code.generate(official, *given)
        else:
            tokens, forwards = official_style.generate(*given, dual=cache == "dual")

    times = clock(ours), clock(plain)
    assert result is not None and tokens is not None
    # `result.tokens` has padding after the end-of-text token, and the other loop has tokens there.
    differ = int((result.trace.ids[:, result.trace.origin :] != tokens.cpu()).sum())
    if differ or result.nfe.tolist() != [forwards] * batch:
        raise SystemExit(
            f"step_overhead.py: the two loops differ in {counted(differ, 'token')} or in their forwards:"
            f" {result.nfe.tolist()} and {forwards}. One of them has an error."
        )
    return times


@torch.no_grad()
def replay(it: Subject, batch: int, cache: str, steps: int, clock: Clock) -> tuple[float, float]:
    """Seconds of the host for `steps` recorded steps, and those between the look at a step and the next replay.

    The replay does nothing, so the same step is made again and again.
    """
    sampler, looked, replayed = it.sampler(cache, steps), clock.now(), []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: replayed.append(clock.now() - looked)

    def fetch(numbers: Tensor) -> list[int]:
        nonlocal looked
        found = numbers.tolist()
        looked = clock.now()
        return found

    engine = StaticEngine(it.denoiser, sampler.plugins, record=record)
    canvas = layout.canvas(
        it.prompts(batch).tolist(), it.new_tokens, range(batch), it.denoiser.spec, sampler.plugins.blocks,
        sampler.noise, cuts=False, multiple=engine.multiple,
    )  # fmt: skip
    state = engine.begin(canvas)
    with patch.object(packing, "_to_host", fetch):
        while len(replayed) < 20:  # the first steps run eagerly; the last ones warm up
            engine.advance(state)
        replayed.clear()
        begun = clock.now()
        for _ in range(REPLAYS):
            engine.advance(state)
        whole = clock.now() - begun
    assert len(replayed) == REPLAYS
    return whole * steps / REPLAYS, sum(replayed) * steps / REPLAYS


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row after the other, each after a run that warms up."""
    kinds = {"overhead": overhead, "speed": speed, "replay": replay}
    if options.official is not None:
        kinds["official"] = partial(speed, official=options.official)
    for name in options.models:
        it = subject(name)
        clock = Clock(CLOCKS[options.clock], it.denoiser.spec.device)
        for batch in options.batch:
            for kind in (*options.kinds, *(["official"] if options.official is not None else [])):
                for cache in options.caches if kind != "official" else ["none"]:
                    target = TARGETS.get((kind, cache)) if name == "llada-157m" else None
                    row = Row(name, it.weights, batch, cache, kind, target=target)
                    for repeat in range(options.repeats + 1):
                        mine, its = kinds[kind](it, batch, cache, options.steps, clock)
                        if repeat:  # the first one warms up
                            row.ours.append(mine)
                            row.other.append(its)
                    yield row


AGAINST = {
    "replay": "replayed step / in series",
    "overhead": "step / forward",
    "speed": "tokens/s / plain loop",
    "official": "tokens/s / published code",
}


def table(rows: Sequence[Row], steps: int) -> Table:
    """The rows as people read them."""
    out = Table(title="ratio: median (lowest to highest) of the repeats")
    for name in ("model", "batch", "cache", "what"):
        out.add_column(name)
    for name in ("ours ms/step", "other ms/step", "ratio", "spread", "wanted"):
        out.add_column(name, justify="right")
    for row in rows:
        against = AGAINST[row.kind]
        wanted = "" if row.target is None else f"{'<=' if row.kind == 'overhead' else '>='} {row.target:.2f}"
        out.add_row(
            f"{row.model} ({row.weights})",
            str(row.batch),
            row.cache,
            against,
            f"{statistics.median(row.ours) / steps * 1e3:.3f}",
            f"{statistics.median(row.other) / steps * 1e3:.3f}",
            f"{statistics.median(row.ratios):.3f}",
            f"{min(row.ratios):.3f} to {max(row.ratios):.3f}",
            wanted,
        )
    return out


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    models = "mini,llada-157m" + ",llada-8b" * torch.cuda.is_available()
    kinds = ("overhead", "speed", "replay")
    it = parser(__doc__)
    add = it.add_argument
    add(
        "--models", type=among("model", SIZES), default=models, help=f"some of {', '.join(SIZES)} (default %(default)s)"
    )
    add("--batch", type=numbers, default="1,8", help="rows of a generation (default %(default)s)")
    caches = among("cache", config.names("cache"))
    add(
        "--caches",
        type=caches,
        default="none,dual",
        help="caches; --kinds speed supports none and dual (default %(default)s)",
    )
    add("--kinds", type=among("kind", kinds), default=",".join(kinds), help="what to measure (default %(default)s)")
    add("--steps", type=positive, default=32, help="forwards per generation (default %(default)s)")
    add("--repeats", type=positive, default=5, help="measurements per ratio (default %(default)s)")
    add("--threads", type=positive, help="threads of torch (default: its own choice)")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for a busy machine (default %(default)s)")
    official = accepted(official_code.load)
    add("--official", type=official, metavar="FILE", help="LLaDA's own generate.py, to compare with (default: none)")
    add_json(it)
    add_smoke(it, "run a tiny model once, to see that it works and gives equal tokens")
    options = parsed(it, argv, models="smoke", batch="1,2", steps=8, repeats=1)
    for name in options.models:
        check(name, options.steps)
    strange = sorted(set(options.caches) - {"none", "dual"})
    if strange and "speed" in options.kinds:
        it.error(f"--caches {','.join(strange)}: --kinds speed compares with a loop that supports only none and dual")
    if options.clock == "cpu" and (options.threads or torch.get_num_threads()) > 1:
        it.error("--clock cpu would count threads that wait for each other: add --threads 1")
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(width=max(Console().width, 100))
    about, rows = circumstances(clock=options.clock), []
    show(console, about)
    for row in measure(options):
        rows.append(row)
        console.print(f"{row.model} batch {row.batch} {row.cache} {row.kind}: {statistics.median(row.ratios):.3f}")
        measured = [asdict(row) | {"ratios": row.ratios} for row in rows]
        save(options.json, about, steps=options.steps, rows=measured)
    console.print(table(rows, options.steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
