"""What a scheduler's decision costs, against that of the plainest one.

    python benchmarks/scheduler_overhead.py                       # every scheduler, blocks and stop of conf/
    python benchmarks/scheduler_overhead.py --only klass,credit --repeats 15 --json overhead.json

Each method judges the same logits (8 rows, a block of 32, a vocabulary of 126464) on the canvas that two steps of its
own left; everything is set against `threshold`, measured next to it in the same repeat. Three ratios:

`tell`      time of `Scheduler.tell` alone, the readout given: medians of the repeats with their range;
`read+tell` time of the readout with the fields the method needs, and `tell`;
`ops`       tensor operations that `tell` dispatches, views not counted: what a GPU that waits for launches feels. A
            count is the same on every machine, so `tests/contract/test_overhead.py` holds it.

One thread, and by default the process's own clock. `keeps`: what a method remembers from step to step, some counts per
row, numbers per position, or distributions as wide as the vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from circumstances import circumstances, save, show
from options import add_json, add_smoke, among, command, parsed, parser, quantity
from rich.console import Console
from rich.table import Table
from scene import Scene
from step_overhead import CLOCKS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_sampler import config
from dllm_sampler.core.protocols import Blocks, Carry, Scheduler, Stop
from dllm_sampler.core.values import Readout
from dllm_sampler.eval.arguments import positive
from dllm_sampler.schedulers.threshold import Threshold

WARM = 2  # steps played before the measured one
# A pass of its verifier; a reward, and the steps of the scheduler inside; a block-causal model.
ELSEWHERE = ("apd", "svdd", "s2d2", "s2d2_editing", "linear_spec")
LIMIT = 2.0  # what a method may cost at most, as a multiple of threshold


class Operations(TorchDispatchMode):
    """Counts tensor operations other than views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> int:
    """Tensor operations of a call."""
    with torch.no_grad(), Operations() as seen:
        run()
    return seen.count


@dataclass
class Judge:
    """A scheduler in the middle of a block."""

    scene: Scene
    scheduler: Scheduler

    def __post_init__(self) -> None:
        self.scheduler = self.scheduler.bind(self.scene.context)
        self.canvas = self.scene.canvas()
        self.carry: Carry = self.scheduler.init(self.canvas)
        for step in range(WARM + 1):
            self.query = self.scheduler.ask(self.canvas, self.carry)
            self.seen = self.read(self.scene.fresh(self.query))
            if step == WARM:
                break
            edit, self.carry = self.tell(self.seen)
            after = self.canvas.apply(self.query.positions, edit)
            self.canvas = after.advance(after.block_over(edit), self.scene.block, edit.finish)

    def read(self, logits: Tensor) -> Readout:
        return self.scene.read(logits, self.canvas, self.query, self.scheduler.needs)

    def tell(self, seen: Readout) -> tuple[Any, Carry]:
        edit, carry = self.scheduler.tell(self.canvas, self.query, seen, self.carry)
        return replace(edit, commit=edit.commit), carry  # a choice that was left open is made: it is the decision

    @property
    def operations(self) -> int:
        return operations(lambda: self.tell(self.seen))

    @property
    def memory(self) -> str:
        """How many numbers it keeps from step to step for each row."""
        shapes = [leaf.shape for leaf in tree_leaves(self.carry) if isinstance(leaf, Tensor)]
        if any(shape[-1] == self.scene.vocab for shape in shapes):
            return "vocabulary"
        return "positions" if any(len(shape) > 1 for shape in shapes) else "counts" if shapes else ""


def schedulers(scene: Scene, only: Sequence[str] = ()) -> dict[str, Scheduler]:
    """Every scheduler of conf/ with its defaults, but those most of whose decision is another's: `ELSEWHERE`."""
    found = {}
    for name in only or [name for name in config.names("scheduler") if name not in ELSEWHERE]:
        settings = {"name": name} | ({"filter": scene.filter()} if name == "learn2pd" else {})
        scheduler = config.build("scheduler", settings)
        assert isinstance(scheduler, Scheduler)
        found[name] = scheduler
    return found


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds per repeat, of the method and of threshold."""

    name: str
    needs: list[str]
    memory: str  # what it keeps from step to step: some numbers per row, per position, or as wide as the vocabulary
    operations: int
    tell: list[float] = field(default_factory=list)
    tell_threshold: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    whole_threshold: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stopwatch:
    """Seconds per call, on the process's own clock or the wall's."""

    now: Callable[[], float]
    repeats: int
    wanted: float  # seconds per measurement

    def once(self, run: Callable[[], object], calls: int = 1) -> float:
        start = self.now()
        for _ in range(calls):
            run()
        return (self.now() - start) / calls

    def calls(self, run: Callable[[], object]) -> int:
        """How many calls take about the wanted time."""
        run()
        return max(1, min(1000, int(self.wanted / max(self.once(run), 1e-6))))

    def compare(self, one: Callable[[], object], base: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Both in turn, after a call of each that warms up."""
        mine, its = self.calls(one), self.calls(base)
        pairs = [(self.once(one, mine), self.once(base, its)) for _ in range(self.repeats)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@torch.no_grad()
def measure(scene: Scene, name: str, judge: Judge, base: Judge, watch: Stopwatch) -> Row:
    """One scheduler against threshold."""
    tell = watch.compare(partial(judge.tell, judge.seen), partial(base.tell, base.seen))

    def whole(it: Judge) -> float:
        logits = scene.fresh(it.query)  # not measured: the model makes them
        return watch.once(lambda: it.tell(it.read(logits)))

    pairs = [(whole(judge), whole(base)) for _ in range(watch.repeats + 1)][1:]
    needs = sorted(judge.scheduler.needs)
    return Row(name, needs, judge.memory, judge.operations, *tell, *map(list, zip(*pairs, strict=True)))


@torch.no_grad()
def others(scene: Scene, base: Judge, watch: Stopwatch) -> list[Row]:
    """What blocks and stops do in a step, against threshold's `tell`."""
    canvas, query, (edit, _) = base.canvas, base.query, base.tell(base.seen)
    after = canvas.apply(query.positions, edit)

    def act(plugin: Blocks | Stop, seen: Readout) -> object:
        if isinstance(plugin, Blocks):
            return plugin.open(canvas, query, seen), plugin.progress(canvas, query, seen, edit), plugin.move(after)
        return plugin.positions(canvas), plugin(canvas, after, query, seen, edit)

    found = []
    for group in ("blocks", "stop"):
        for name in config.names(group):
            plugin: Any = config.build(group, name).bind(scene.context)
            seen = scene.read(scene.fresh(query), canvas, query, plugin.needs)
            run = partial(act, plugin, seen)
            times = watch.compare(run, partial(base.tell, base.seen))
            found.append(Row(f"{group}={name}", sorted(plugin.needs), "", operations(run), *times))
    return found


def ratios(mine: Sequence[float], its: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, its, strict=True)]


def spread(values: Sequence[float], mark: bool = False) -> str:
    if not values:
        return ""
    middle = statistics.median(values)
    return f"{middle:.2f}{'!' if mark and middle > LIMIT else ''} ({min(values):.2f}-{max(values):.2f})"


def table(rows: Sequence[Row], base: int) -> Table:
    """The rows as people read them."""
    out = Table(title=f"median (lowest to highest) of the repeats; ! = above {LIMIT:g}")
    for name in ("plug-in", "needs"):
        out.add_column(name)
    for name in ("ops", "ops ratio", "tell us", "tell ratio", "read+tell ms", "read+tell ratio"):
        out.add_column(name, justify="right")
    out.add_column("keeps")
    for row in rows:
        whole = ratios(row.whole, row.whole_threshold)
        out.add_row(
            row.name,
            ", ".join(row.needs),
            str(row.operations),
            f"{row.operations / base:.2f}{'!' * (row.operations > LIMIT * base)}",
            f"{statistics.median(row.tell) * 1e6:.0f}",
            spread(ratios(row.tell, row.tell_threshold), True),
            f"{statistics.median(row.whole) * 1e3:.1f}" if whole else "",
            spread(whole, True),
            row.memory,
        )
    return out


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    schedulers = among("scheduler", config.names("scheduler"))
    add(
        "--only",
        type=schedulers,
        metavar="NAME,...",
        default=[],
        help="schedulers (default: all, and blocks and stops)",
    )
    add("--batch", type=positive, default=8, help="rows (default %(default)s)")
    add("--block", type=positive, default=32, help="columns of a block (default %(default)s)")
    add("--vocab", type=positive, default=126464, help="tokens of the vocabulary (default %(default)s)")
    add("--repeats", type=positive, default=9, help="measurements per ratio (default %(default)s)")
    add("--wanted", type=quantity, default=0.02, help="seconds per measurement of tell (default %(default)s)")
    add("--clock", choices=CLOCKS, default="cpu", help="cpu: the process's own seconds (default %(default)s)")
    add_json(it)
    add_smoke(it, "a tiny vocabulary, once: does it run?")
    return parsed(it, argv, batch=2, block=8, vocab=640, repeats=1, wanted=1e-4)


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    console = Console(width=max(Console().width, 150))
    chosen = {key: getattr(options, key) for key in ("batch", "block", "vocab", "repeats")}
    about = circumstances(clock=options.clock, **chosen)
    show(console, about)
    watch = Stopwatch(CLOCKS[options.clock], options.repeats, options.wanted)
    with torch.no_grad():
        scene = Scene(options.batch, options.block, options.vocab)
        base = Judge(scene, Threshold())
        rows = [
            measure(scene, name, Judge(scene, scheduler), base, watch)
            for name, scheduler in schedulers(scene, options.only).items()
        ]
        rows += [] if options.only else others(scene, base, watch)
    console.print(table(rows, base.operations))
    save(options.json, about, rows=[asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
