"""Cost of a ragged batch: positions and time of prompts of many lengths together, against one by one.

    python benchmarks/batching.py                                   # an hour or two on one core
    python benchmarks/batching.py --caches dual --schedulers threshold --repeats 1       # some minutes
    python benchmarks/batching.py --tables branches                 # drafts and guidance: positions alone

The same prompts run at each batch size, on an untrained model. `forwards`, `positions` and `head rows` are the costs,
counted where nothing can hide: calls of the embedding, the ids it was given, and the hidden states that the head
multiplied, padding, fillers and finished rows included. `/ needed` divides them by the costs of each prompt alone:
positions as `Result.trace.rows` counts them at batch 1, head rows as paid at batch 1. `time` is the ratio to the
sampler at batch 1, median and range of the repeats, in which loops and batch sizes take turns. `differ`: prompts whose
tokens are not those of batch 1; rounding does that, in float64 hardly ever.

`lock-step` is the line to beat: a plain loop in which rows wait for one another (`lock_step.py`), with the same rule.
Its head answers for every computed row, as published loops have it. `block_causal` runs on a model with block-causal
attention, all others on a bidirectional one. The second table has drafts (`freedave` around the threshold) and
classifier-free guidance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import lock_step
import torch
from circumstances import circumstances, save, show
from options import add_json, among, command, numbers, parser, positive, quantity
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from untrained import llada

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.sampler import Sampler

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SCHEDULERS = ("threshold", "fixed")
TABLES = ("batches", "branches")
BRANCHED = ("freedave", "guided")  # each around the threshold
FEW = 16  # prompts of the second table, which sets batch 8 against batch 1

Prompts = Sequence[list[int]]


@dataclass
class Meter:
    """A count of a network's work in any loop: ids `[N, M]` count as much as `[1, N*M]` packed ones."""

    forwards: int = 0
    positions: int = 0
    head: int = 0

    @contextmanager
    def on(self, network: Transformer) -> Iterator[None]:
        """Count the calls of the embedding and of the head from 0.

        Raises:
            RuntimeError: one of them was not called, so that nothing is known.
        """
        self.forwards = self.positions = self.head = 0
        handles = [
            network.embed.register_forward_pre_hook(self._embeds),
            network.lm_head.register_forward_pre_hook(self._answers),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not (self.positions and self.head):
            raise RuntimeError("the network ran without its embedding or its head, so its work was not counted")

    def _embeds(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.forwards += 1
        self.positions += given[0].numel()

    def _answers(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.head += given[0].numel() // given[0].shape[-1]


@dataclass
class Row:
    """One line of a table: all prompts at one batch size. Seconds and ratios, one per repeat."""

    loop: str  # sampler or lock-step
    scheduler: str
    cache: str
    batch: int
    forwards: int = 0
    positions: int = 0
    needed: int = 0  # positions
    head: int = 0  # rows
    head_needed: int = 0
    differ: int = 0  # prompts
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A scheduler under a cache, as every loop that knows them runs it."""

    scheduler: str
    cache: str
    network: Transformer
    loops: dict[str, Callable[[Prompts], tuple[Tensor, int]]]  # tokens [B, G], and positions that were needed

    def measured(
        self, prompts: Prompts, batches: Sequence[int], now: Callable[[], float], repeats: Iterable[int]
    ) -> list[Row]:
        """The rows of all loops; `batches` and `repeats` (0, 1, ...) are taken in turn, `batches` begins with 1."""
        rows = [Row(loop, self.scheduler, self.cache, batch) for loop in self.loops for batch in batches]
        alone = rows[0]
        meter, first = Meter(), None
        for loop in self.loops.values():
            loop(prompts[:1])  # warms up
        for repeat in repeats:
            for row in rows:
                with meter.on(self.network):
                    begun = now()
                    parts = [prompts[at : at + row.batch] for at in range(0, len(prompts), row.batch)]
                    found = [self.loops[row.loop](part) for part in parts]
                    row.seconds.append(now() - begun)
                row.ratios.append(row.seconds[-1] / alone.seconds[-1])
                if repeat:  # nothing but the time can be another
                    continue
                row.forwards, row.positions, row.head = meter.forwards, meter.positions, meter.head
                tokens = torch.cat([tokens for tokens, _ in found])
                if first is None:
                    first, alone.needed = tokens, sum(needed for _, needed in found)
                row.needed, row.head_needed = alone.needed, alone.head
                row.differ = int((tokens != first).any(1).sum())
        return rows


def untrained(options: argparse.Namespace) -> TransformerDenoiser:
    """The untrained model; token 0 ends texts, token 1 is the mask."""
    return llada(
        options.vocabulary, options.width, options.inner, options.layers, options.heads, dtype=DTYPES[options.dtype]
    )


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Random words, never a special token, in random lengths."""
    generator = torch.Generator().manual_seed(options.seed)
    lengths = torch.randint(options.shortest, options.longest + 1, (options.prompts,), generator=generator)
    return [torch.randint(2, options.vocabulary, (int(n),), generator=generator).tolist() for n in lengths]


def case(name: str, cache: str, it: TransformerDenoiser, options: argparse.Namespace) -> Case:
    """One of `SCHEDULERS` or `BRANCHED` under a cache.

    Raises:
        UserError: they cannot be combined.
    """
    sure = options.guided_threshold if name == "guided" else options.threshold
    threshold = {"name": "threshold", "threshold": sure}
    rules: dict[str, dict[str, Any]] = {
        "fixed": {"name": "fixed", "steps": options.steps},
        "freedave": {"name": "freedave", "inner": threshold},
    }
    if cache == "block_causal":
        it = replace(it, attention="block_causal")
    blocks = {"name": "fixed", "length": options.block}
    model = guided(it, 1.0) if name == "guided" else it
    sampler = Sampler(model, scheduler=rules.get(name, threshold), cache=cache, blocks=blocks, stop="none")

    def ours(rows: Prompts) -> tuple[Tensor, int]:
        result = sampler.generate(rows, max_new_tokens=options.tokens)
        return result.tokens, int(result.trace.rows.sum())

    mask_id = it.mask_id
    assert mask_id is not None

    def plain(rows: Prompts) -> tuple[Tensor, int]:
        given = options.tokens, options.block, options.threshold, mask_id, cache
        return lock_step.generate(it.transformer, rows, *given), 0

    loops = {"sampler": ours}
    if name == "threshold" and cache in lock_step.CACHES:
        loops["lock-step"] = plain
    return Case(name, cache, it.transformer, loops)


def ratio(paid: int, needed: int) -> str:
    """Return the ratio, for a table."""
    return f"{paid / needed:.2f}"


def spread(values: Sequence[float]) -> str:
    """Median (lowest to highest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def heading(timed: bool) -> list[str]:
    """Return the first two lines of a table in Markdown, with time or without."""
    head = ["scheduler", "cache", "loop", "batch", "forwards"]
    head += ["positions", "positions / needed", "head rows", "head rows / needed"]
    head += [*(["seconds", "time"] if timed else []), "differ"]
    return [_line(head), _line(["---"] * len(head))]


def line(row: Row, timed: bool) -> str:
    """Return a row as a line of the table."""
    found = [row.scheduler, row.cache, row.loop, str(row.batch), str(row.forwards)]
    found += [str(row.positions), ratio(row.positions, row.needed)]
    found += [str(row.head), ratio(row.head, row.head_needed)]
    if timed:
        found += [f"{statistics.median(row.seconds):.2f}", spread(row.ratios)]
    return _line([*found, str(row.differ)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    it = parser(__doc__)
    add = it.add_argument
    caches, schedulers, tables = "none,prefix,dual,block_causal,dkv", ",".join(SCHEDULERS), ",".join(TABLES)
    which = "caches to measure each scheduler with (default %(default)s)"
    add("--tables", type=among("table", TABLES), default=tables, help="what to measure (default %(default)s)")
    add("--caches", type=among("cache", config.names("cache")), default=caches, help=which)
    add(
        "--schedulers",
        type=among("scheduler", SCHEDULERS),
        default=schedulers,
        help="schedulers to measure (default %(default)s)",
    )
    add("--batches", type=numbers, default="1,4,8,16,32", help="batch sizes, the first of them 1 (default %(default)s)")
    add("--prompts", type=positive, default=32, help="number of prompts (default %(default)s)")
    add("--shortest", type=positive, default=64, help="least number of tokens of a prompt (default %(default)s)")
    add("--longest", type=positive, default=200, help="largest number of tokens of a prompt (default %(default)s)")
    add("--seed", type=positive, default=1, help="seed of the prompts (default %(default)s)")
    add("--tokens", type=positive, default=128, help="tokens of an answer (default %(default)s)")
    add("--block", type=positive, default=32, help="positions of a block (default %(default)s)")
    add(
        "--threshold",
        type=quantity,
        default=0.08,
        help="about six tokens per forward at the default (default %(default)s)",
    )
    add(
        "--guided-threshold",
        type=quantity,
        default=0.3,
        help="threshold under guidance, which raises confidence (default %(default)s)",
    )
    add("--steps", type=positive, default=24, help="steps of scheduler fixed (default %(default)s)")
    add("--vocabulary", type=positive, default=512, help="tokens that the model knows (default %(default)s)")
    add("--width", type=positive, default=384, help="hidden size of the model (default %(default)s)")
    add("--inner", type=positive, default=1024, help="width of the feed-forward layers (default %(default)s)")
    add("--layers", type=positive, default=4, help="layers of the model (default %(default)s)")
    add("--heads", type=positive, default=6, help="attention heads of each layer (default %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default %(default)s)")
    add("--repeats", type=positive, default=3, help="measurements of each time (default %(default)s)")
    add("--threads", type=positive, default=1, help="threads of torch (default %(default)s)")
    add("--clock", choices=CLOCKS, default="cpu", help="cpu: processor time of the process (default %(default)s)")
    add_json(it)
    options = it.parse_args(argv)
    given = ",".join(map(str, options.batches))
    if options.batches[0] != 1:
        it.error(f"--batches {given}: should begin with 1, which the others are compared with")
    if max(options.batches) > options.prompts:
        it.error(f"--batches {given}: no batch can be larger than --prompts {options.prompts}")
    if options.longest < options.shortest:
        it.error(f"--longest {options.longest}: should be at least --shortest {options.shortest}")
    if options.vocabulary < 3:
        it.error(f"--vocabulary {options.vocabulary}: should be at least 3: the end-of-text token, the mask and a word")
    if options.width % (2 * options.heads):
        it.error(f"--width {options.width}: should be a multiple of twice --heads {options.heads}")
    if options.clock == "cpu" and options.threads > 1:
        it.error("--clock cpu would count threads that wait for each other: add --clock wall")
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    denoiser, given = untrained(options), prompts(options)
    room = denoiser.spec.max_positions - options.tokens
    if options.longest > room:
        raise UserError(
            "option-range",
            f"--longest {options.longest} and --tokens {options.tokens} exceed the model. Set at most {room}.",
        )
    both = [1, min(8, options.prompts)]
    work = {
        "batches": [
            (case(name, cache, denoiser, options), given, options.batches, options.repeats)
            for name, cache in product(options.schedulers, options.caches)
            if "batches" in options.tables
        ],
        "branches": [
            (case(name, cache, denoiser, options), given[:FEW], both, 1)
            for name, cache in product(BRANCHED, ("none", "dual"))
        ],
    }
    about = circumstances(**{name: str(value) for name, value in vars(options).items() if name != "threads"})
    show(Console(width=120), about)
    found: dict[str, list[Row]] = {name: [] for name in TABLES}
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as shown:
        task = shown.add_task("batching", total=sum(repeats for name in options.tables for *_, repeats in work[name]))

        def turns(repeats: int) -> Iterator[int]:
            for repeat in range(repeats):
                yield repeat
                shown.advance(task)

        for name in options.tables:
            print("", *heading(name == "batches"), sep="\n", flush=True)
            for one, some, batches, repeats in work[name]:
                shown.update(task, description=f"{one.scheduler}, {one.cache}")
                rows = one.measured(some, batches, CLOCKS[options.clock], turns(repeats))
                print(*(line(row, name == "batches") for row in rows), sep="\n", flush=True)  # each takes minutes
                found[name] += rows
                save(options.json, about, **{name: [asdict(row) for row in rows] for name, rows in found.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
