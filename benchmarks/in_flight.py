"""Savings of in-flight batching: forwards and time of many prompts, against batches that wait for their slowest row.

    python benchmarks/in_flight.py                              # mini's tasks, some minutes on one core
    python benchmarks/in_flight.py --model llada-157m --prompts 32 --batch 8 --repeats 1
    python benchmarks/in_flight.py --model llada-8b --graph --clock wall --schedulers fixed --shortest 32 --tokens 128

The same prompts run through `generate_many` with `batching=in_flight` and `static`, in turns.

`in flight`  mean rows of a forward over the places, until no prompt is left to take one
`forwards`   of the whole set; `bound`: 1.1 times the forwards of all answers over the places, and the longest answer
`tokens/s`   of all answers, each up to and with its end token, over the seconds, in flight
`time`       static over in flight, median and range of the repeats. On a CPU a finished row costs nothing either way,
             since steps are packed: only what a step costs outside the arithmetic can be saved
`differ`     prompts whose tokens are not the same both ways; rounding does that
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from random import Random
from typing import Any, Literal
from unittest.mock import patch

import torch
from circumstances import circumstances, report
from options import add_json, among, command, numbers, parser, positive, quantity
from rich.console import Console
from rich.progress import track
from rich.table import Table
from subjects import SIZES, check, subject

from dllm_sampler import Answer, Sampler, config
from dllm_sampler.engine.in_flight import Ended, RunningBatch
from dllm_sampler.models.mini_tasks import TASKS

WAYS: tuple[Literal["in_flight", "static"], ...] = ("in_flight", "static")
RULES = ("threshold", "fixed")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Row:
    """One scheduler, cache and number of places."""

    scheduler: str
    cache: str
    batch: int
    tokens: int = 0  # of all answers, each up to and with its end token
    forwards: int = 0
    nfe: list[int] = field(default_factory=list)  # of each answer
    in_flight: list[int] = field(default_factory=list)  # rows of each forward
    differ: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    @property
    def bound(self) -> float:
        """Forwards that the set may take."""
        return 1.1 * sum(self.nfe) / self.batch + max(self.nfe)

    @property
    def share(self) -> float:
        """Mean rows in flight over the places, until the last prompt has its place."""
        full = [at for at, rows in enumerate(self.in_flight) if rows == self.batch]
        return statistics.mean(self.in_flight[: full[-1] + 1]) / self.batch if full else 0.0


def prompts(name: str, count: int, mask_id: int) -> list[str] | list[list[int]]:
    """Prompts of `mini`'s tasks in a random order; for random weights, random words, 64 to 200 of them."""
    random = Random(0)
    if name == "mini":
        each = -(-count // len(TASKS))
        tasks = [config.build("task", {"name": "mini", "operation": one, "count": each}) for one in TASKS]
        found = [sample.prompt for task in tasks for sample in task.samples()]
        random.shuffle(found)
        return found[:count]
    most = 24 if name == "smoke" else 200
    words = [word for word in range(90) if word != mask_id]
    return [random.choices(words, k=random.randint(most // 3, most)) for _ in range(count)]


def answers(
    one: Sampler, row: Row, given: Sequence[Any], tokens: list[int], way: Literal["in_flight", "static"]
) -> list[Answer]:
    """Every answer, in the order of the prompts."""
    return list(one.generate_many(given, batch_size=row.batch, max_new_tokens=tokens, batching=way, order="given"))


def count(one: Sampler, row: Row, given: Sequence[Any], tokens: list[int]) -> None:
    """Count the work of both ways, which warms them up."""
    step = RunningBatch.step

    def counted(batch: RunningBatch) -> Ended | None:
        row.in_flight.append(len(batch.lanes) - len(batch.free))
        return step(batch)

    with patch.object(RunningBatch, "step", counted):
        flown = answers(one, row, given, tokens, "in_flight")
    stood = answers(one, row, given, tokens, "static")
    row.tokens, row.forwards = sum(answer.length for answer in flown), len(row.in_flight)
    row.nfe = [answer.nfe for answer in flown]
    row.differ = sum(not torch.equal(a.tokens, b.tokens) for a, b in zip(flown, stood, strict=True))


def clocked(one: Sampler, row: Row, given: Sequence[Any], tokens: list[int], options: argparse.Namespace) -> None:
    """The time of both ways, once."""
    for way in WAYS:
        begun = CLOCKS[options.clock]()
        answers(one, row, given, tokens, way)
        row.seconds[way].append(CLOCKS[options.clock]() - begun)


def table(rows: Sequence[Row]) -> Table:
    """Counts, and medians with their range."""
    shown = Table(title="static over in flight: median (lowest to highest) of the repeats")
    for head in (
        "scheduler",
        "cache",
        "places",
        "in flight",
        "forwards",
        "bound",
        "longest",
        "seconds",
        "tokens/s",
        "time",
        "differ",
    ):
        shown.add_column(head, justify="right")
    for row in rows:
        ratios = [slow / quick for quick, slow in zip(row.seconds["in_flight"], row.seconds["static"], strict=True)]
        shown.add_row(
            row.scheduler,
            row.cache,
            str(row.batch),
            f"{row.share:.2f}",
            str(row.forwards),
            f"{row.bound:.0f}",
            str(max(row.nfe)),
            f"{statistics.median(row.seconds['in_flight']):.2f}",
            f"{row.tokens / statistics.median(row.seconds['in_flight']):.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            str(row.differ),
        )
    return shown


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    it = parser(__doc__)
    add = it.add_argument
    add("--model", choices=SIZES, default="mini", help="others than mini have random weights (default %(default)s)")
    add(
        "--schedulers",
        type=among("scheduler", ("threshold", "fixed")),
        default="threshold",
        help="schedulers to measure (default %(default)s)",
    )
    add(
        "--caches",
        type=among("cache", ("none", "prefix", "dual")),
        default="none,dual",
        help="caches to measure (default %(default)s)",
    )
    add("--batch", type=numbers, default="8,16", help="lanes of the batch (default %(default)s)")
    add("--prompts", type=positive, default=112, help="number of prompts (default %(default)s)")
    add("--tokens", type=positive, default=64, help="tokens of an answer (default %(default)s)")
    add("--shortest", type=positive, help="tokens of the shortest answer (default: all have --tokens)")
    add("--graph", action="store_true", help="replay steps as CUDA graphs, which needs a GPU")
    add("--block", type=positive, default=16, help="positions of a block (default %(default)s)")
    add("--threshold", type=quantity, default=0.9, help="threshold of scheduler threshold (default %(default)s)")
    add("--repeats", type=positive, default=5, help="measurements of each time (default %(default)s)")
    add("--threads", type=positive, default=1, help="threads of torch (default %(default)s)")
    add("--clock", choices=CLOCKS, default="cpu", help="cpu: processor time of the process (default %(default)s)")
    add_json(it)
    options = it.parse_args(argv)
    check(options.model)
    if options.shortest and options.shortest > options.tokens:
        it.error(f"--shortest {options.shortest}: should be at most --tokens {options.tokens}")
    if options.graph and options.model != "llada-8b":
        it.error(f"--graph needs a model on a GPU, which {options.model} is not: choose --model llada-8b")
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    it = subject(options.model)
    assert it.denoiser.mask_id is not None
    given = prompts(options.model, options.prompts, it.denoiser.mask_id)
    rules = {"threshold": {"name": "threshold", "threshold": options.threshold}, "fixed": "fixed"}
    random, least = Random(1), options.shortest or options.tokens
    tokens = [random.randint(least, options.tokens) for _ in given]
    rows, samplers = [], []
    for name, cache, batch in product(options.schedulers, options.caches, options.batch):
        plugins = {"scheduler": rules[name], "cache": cache, "blocks": {"name": "fixed", "length": options.block}}
        if options.model == "mini":
            one = Sampler.from_pretrained("mini", **plugins)
        else:
            one = Sampler(it.denoiser, stop="none", cuda_graph=options.graph, **plugins)
        row = Row(name, cache, batch)
        count(one, row, given, tokens)
        if options.graph:  # a step of a size runs eagerly once, and is recorded when it comes again
            clocked(one, row, given, tokens, options)
            row.seconds = {way: [] for way in WAYS}
        rows.append(row)
        samplers.append(one)
    for _ in track(range(options.repeats), "repeats", console=Console(stderr=True), transient=True):
        for row, one in zip(rows, samplers, strict=True):
            clocked(one, row, given, tokens, options)
    about = circumstances(**{name: str(value) for name, value in vars(options).items()})
    report(about, table(rows), [asdict(row) for row in rows], options.json, width=140)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
