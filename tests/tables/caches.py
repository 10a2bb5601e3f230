"""Every cache on `mini` and on 157 million random weights: writes the table and the picture of docs/caches.md.

`python -m tests.tables.caches [--smoke] [--check]`; a cut run resumes. Each cache is followed step by step, and
every so often the step is made without a cache, too, on the same canvas.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.options import positive
from benchmarks.untrained import llada_157m
from dllm_sampler import config
from dllm_sampler.cache.base import Slots
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.core.protocols import Cache
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.engine import layout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.eval import curves
from dllm_sampler.eval.report.figure import require_matplotlib
from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.generation.batch import Reader
from dllm_sampler.host import files
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.sampler import Sampler
from tests.tables import markdown
from tests.tables.points import BEST, PLAIN, Point, label
from tests.tables.schedulers import Setup, here, settings
from tests.tables.store import Plugins, Store

SECTION = "cache table"
HEAD = ("cache", "time", "positions", "bytes per token", "same tokens", "right")
COMMAND = "python -m tests.tables.caches"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "caches.md"
OUTPUT = Path("outputs/cache-table")
SCHEMA = 3
# Refused by models that see the whole canvas; `exact` is `none` there.
APART = ("block_causal", "sub_block", "exact")
RANDOM_WORDS = "random words"  # the task of a model without training


@dataclass(frozen=True)
class CacheSetup(Setup):
    """What is run, and where."""

    parallel: Plugins  # the scheduler of all caches
    foreseen: Plugins  # the one of caches that must know what comes
    prompt_length: int = 0  # of random words
    max_steps: int | None = None
    every: int = 1  # one step in this many is repeated without a cache

    def plugins(self, cache: str) -> Plugins:
        """What a cache is measured with."""
        foresees = cache == "dkv_greedy" or cache.startswith("none ")
        return {
            "cache": cache.partition(" ")[0],
            "scheduler": self.foreseen if foresees else self.parallel,
            "blocks": {"name": "fixed", "length": self.block_length},
            "stop": "prefix" if self.tasks != (RANDOM_WORDS,) else "none",
        }


@dataclass(frozen=True)
class Figures:
    """Sums over the generations of one task."""

    right: int  # answers
    answers: tuple[tuple[int, ...], ...]  # tokens, up to the first end token
    steps: int
    computed: int  # positions, over steps and rows that live
    columns: int  # the same without a cache
    seconds: float  # process time of all steps
    seconds_without: float  # of the steps that were repeated without a cache
    repeated: int
    bytes_per_token: float  # held by the live cache per column and row

    @staticmethod
    def total(parts: Sequence[Figures]) -> Figures:
        """All of them together."""
        sums = {name: sum(getattr(one, name) for one in parts) for name in SUMS}
        held = max(one.bytes_per_token for one in parts)
        return Figures(answers=tuple(row for one in parts for row in one.answers), bytes_per_token=held, **sums)


SUMS = [one.name for one in fields(Figures) if one.name not in ("answers", "bytes_per_token")]


def store(path: Path, setup: CacheSetup) -> Store[Figures]:
    """What is measured already."""

    def read(entry: Mapping[str, Any]) -> Figures:
        answers = tuple(tuple(row) for row in entry["figures"]["answers"])
        return Figures(**{**entry["figures"], "answers": answers})

    about = {name: value for name, value in asdict(setup).items() if name not in ("tasks", "parallel", "foreseen")}
    return Store(path, SCHEMA, about, settings, read, lambda figures: {"figures": asdict(figures)})


def caches() -> list[str]:
    """The rows: no cache first, also as the schedule has it that `dkv_greedy` needs."""
    rest = [name for name in config.names("cache") if name not in (*APART, "none")]
    return ["none", *rest, "none random_order"]


def tensors(held: object) -> Iterator[Tensor]:
    """The tensors that a live cache holds, in fields, lists and objects of its own."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from tensors(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from tensors(value)
    elif isinstance(held, Cache | Slots) or (is_dataclass(held) and not isinstance(held, ModelSpec)):
        yield from tensors(vars(held))


def bytes_held(cache: Cache) -> int:
    """Bytes of the storage behind these tensors, each one once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors(cache)}
    return sum(storages.values())


def timed(engine: Engine, state: Generation) -> float:
    """One step; its process time, which leaves out waiting on a shared machine."""
    start = time.process_time()
    engine.advance(state)
    return time.process_time() - start


@torch.no_grad()
def follow(base: Sampler, plugins: Plugins, given: Sequence[Prompt], setup: CacheSetup) -> tuple[Figures, list[str]]:
    """A generation, step by step; every so often the step is made without a cache too, on the same canvas."""
    sampler = Sampler(base.denoiser, tokenizer=base.tokenizer, **plugins)
    other = Sampler(base.denoiser, tokenizer=base.tokenizer, **{**plugins, "cache": "none"})
    engine, reference = Engine(base.denoiser, sampler.plugins), Engine(base.denoiser, other.plugins)
    chosen, spec = sampler.plugins, base.denoiser.spec
    rows = prompts.encode(list(given), base.tokenizer, spec, setup.max_new_tokens)
    seeds = [setup.seed + i for i in range(len(rows))]
    canvas = layout.canvas(rows, setup.max_new_tokens, seeds, spec, chosen.blocks, sampler.noise, cuts=chosen.stop.cuts)
    state = engine.begin(canvas)
    sums: dict[str, Any] = dict.fromkeys(SUMS, 0)
    held = 0
    for step in range(1, (setup.max_steps or chosen.scheduler.bound(setup.max_new_tokens)) + 1):
        before, spent = state.canvas, state.recorder.computed
        repeats = (step - 1) % setup.every == 0 and plugins["cache"] != "none"
        if repeats:
            plain = replace(state, cache=other.plugins.cache.init(before, spec), recorder=Recorder(before))
            reference.ask_and_poll(plain)
            sums["seconds_without"] += timed(reference, plain)
            sums["repeated"] += 1
        sums["seconds"] += timed(engine, state)
        columns = int((before.seen().sum(1) * ~before.done).sum())
        computed = int((state.recorder.computed - spent).sum())
        sums["computed"] += computed
        sums["columns"] += columns
        sums["steps"] += 1
        held = max(held, bytes_held(state.cache))
        if state.finished:
            break
    result = Reader(sampler.runtime, ()).result(state.canvas, state.recorder)
    answers = tuple(
        tuple(row[:length]) for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
    )
    return Figures(answers=answers, bytes_per_token=held / (len(rows) * canvas.length), **sums), result.texts or []


def measure(base: Sampler, plugins: Plugins, task: str, setup: CacheSetup) -> Figures:
    """The generations of one task, batch by batch."""
    if task == RANDOM_WORDS:
        rng, mask = Random(setup.seed), base.denoiser.spec.mask_id
        words = [word for word in range(2, base.denoiser.spec.vocab_size) if word != mask]
        given: list[Any] = [rng.choices(words, k=setup.prompt_length) for _ in range(setup.prompts)]
    else:
        given = held_out_prompts(TASKS[task], setup.prompts, setup.seed)
    parts = []
    for start in range(0, len(given), setup.batch):
        part = given[start : start + setup.batch]
        figures, texts = follow(base, plugins, part, setup)
        if task != RANDOM_WORDS:
            right = sum(TASKS[task].check(prompt, text) for prompt, text in zip(part, texts, strict=True))
            figures = replace(figures, right=right)
        parts.append(figures)
    return Figures.total(parts)


@dataclass(frozen=True)
class Row:
    """A cache's figures, with those of no cache under the same schedule."""

    cache: str
    figures: Figures
    without: Figures

    @property
    def share(self) -> float:
        """Positions computed, in %."""
        return 100 * self.figures.computed / self.figures.columns

    @property
    def ratio(self) -> float:
        """Mean time of a step over that of the steps repeated without a cache."""
        found = self.figures
        return found.seconds / found.steps * found.repeated / found.seconds_without if found.repeated else 1.0

    @property
    def agreement(self) -> float:
        """Tokens in % that are those of no cache, over the answers of the latter."""
        pairs = zip(self.figures.answers, self.without.answers, strict=True)
        equal = sum(sum(a == b for a, b in zip(mine, true, strict=False)) for mine, true in pairs)
        return 100 * equal / max(1, sum(len(true) for true in self.without.answers))

    @property
    def exact(self) -> float:
        """Right answers in %."""
        return 100 * self.figures.right / len(self.figures.answers)


def run(base: Sampler, setup: CacheSetup, found: Store[Figures], console: Console) -> list[Row]:
    """Measure what the store does not have, all caches on one task before the next."""
    chosen = {cache: setup.plugins(cache) for cache in caches()}
    work = [(task, cache) for task in setup.tasks for cache in chosen if found.find(chosen[cache], task) is None]
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(work))
        for done, (task, cache) in enumerate(work):
            progress.update(shown, completed=done, description=f"{setup.model}, {task}: {cache}")
            if done == 0 or (task != RANDOM_WORDS and done < len(chosen)):  # the first call pays for later ones
                measure(base, chosen[cache], task, replace(setup, prompts=min(setup.batch, setup.prompts), max_steps=1))
            found.add(chosen[cache], task, measure(base, chosen[cache], task, setup))

    def figures(cache: str) -> Figures:
        parts = [found.find(chosen[cache], task) for task in setup.tasks]
        return Figures.total([one for one in parts if one is not None])

    each = {cache: figures(cache) for cache in chosen}
    return [Row(cache, each[cache], each[without(chosen, cache)]) for cache in chosen]


def without(chosen: Mapping[str, Plugins], cache: str) -> str:
    """The row without a cache under the schedule of `cache`."""
    return next(
        name for name in ("none", "none random_order") if chosen[name]["scheduler"] == chosen[cache]["scheduler"]
    )


def draw(timed: Sequence[Row], judged: Sequence[Row], where: str, what: str) -> bytes:
    """A PNG file: time from the rows `timed` on the model `where`, agreement from those `judged` on `what`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    axes, agreement = figure.subplots(), {row.cache: row.agreement for row in judged}
    kept = [row for row in timed if row.cache != "none random_order"]
    points = [Point(row.cache, (row.ratio, agreement[row.cache])) for row in kept]
    best = curves.front({one.method: (-one.point[0], one.point[1]) for one in points})
    for one in points:
        axes.plot(*one.point, "o", color=BEST if one.method in best else PLAIN, markersize=5)
    axes.plot([], [], "o", color=BEST, markersize=5, label="no other cache is as fast and agrees as much")
    axes.plot([], [], "o", color=PLAIN, markersize=5, label="another one is at least as good in both")
    axes.set_xlabel(f"← faster     time per step on {where}, no cache = 1 (lower is better)")
    axes.set_ylabel(f"tokens as without a cache on {what}, % (higher is better)")
    axes.legend(loc="lower right", frameon=False, title="the best corner is at the top left")
    axes.margins(0.15)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # labels are placed by what their text measures
    label(axes, points, best, points)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def cells(timed: Row, judged: Row) -> list[str]:
    """Return a line of the table: costs of the row `timed`, answers of the row `judged`."""
    stored = not timed.cache.startswith("none")
    return [
        f"`{timed.cache}`",
        f"{timed.ratio:.2f}",
        f"{timed.share:.1f}",
        f"{timed.figures.bytes_per_token:.0f}",
        f"{judged.agreement:.1f}" if stored else "",
        f"{judged.exact:.1f}",
    ]


def content(results: Sequence[tuple[CacheSetup, Sequence[Row]]]) -> str:
    """Return the section of the document: the table, and what a reader must know about it."""
    (setup, rows), (judging, judged) = results[0], results[-1]
    answers = {row.cache: row for row in judged}
    lines = [cells(row, answers[row.cache]) for row in sorted(rows, key=lambda row: row.ratio)]
    threads = f"{setup.threads} thread{'s' * (setup.threads > 1)}"
    return "\n\n".join(
        [
            markdown.table(HEAD, lines),
            f"Costs are those of {_about(setup)} *Time*: process time of a step, over that without a cache on the same"
            f" canvas, {threads}. *Positions*: computed, in % of all. *Bytes per token*: what the cache holds, over the"
            " columns of the canvas.",
            f"Answers are those of {_about(judging)} *Same tokens*: in %, as without a cache. *Right*: in %.",
            f"{', '.join(f'`{name}`' for name in APART)} are left out: two are for block-causal models, and `exact` is"
            " `none` for others."
            f" {setup.machine}, {setup.versions}. Made by `{COMMAND}`.",
        ]
    )


def _about(setup: CacheSetup) -> str:
    """Return what is run, as the end of a sentence."""
    scheduler, foreseen = (
        " ".join(f"{key}={value}" if key != "name" else f"scheduler={value}" for key, value in plugins.items())
        for plugins in (setup.parallel, setup.foreseen)
    )
    canvas = f"{setup.max_new_tokens} tokens in blocks of {setup.block_length}, batch {setup.batch}"
    rules = f"`{scheduler}` (`dkv_greedy`: `{foreseen}`)"
    if setup.tasks == (RANDOM_WORDS,):
        return (
            f"{setup.model} (random weights, float32): {setup.prompt_length} random words, {canvas}, the first"
            f" {setup.max_steps} steps of {rules}."
        )
    return (
        f"{setup.model}: {setup.prompts} prompts of each of {len(setup.tasks)} tasks, {canvas}, {rules}, `stop=prefix`."
    )


def stale(docs: Path) -> list[str]:
    """What the document lacks or has too much of, one sentence each. Figures are not compared."""
    text = markdown.read(docs, SECTION)
    section = markdown.section(text, SECTION) or ""
    tables = [table for table in markdown.tables(section) if table[0][0] == HEAD[0]]
    found = [] if len(tables) == 1 else [f"{docs} has {len(tables)} tables of caches, and should have one"]
    for table in tables:
        have, want = {line[0].strip("`") for line in table[1:]}, set(caches())
        found += [f"{docs} has no row for {name}" for name in sorted(want - have)]
        found += [f"{docs} has a row for {name}, which is no cache" for name in sorted(have - want)]
        timed = table[0].index("time")
        found += [f"{docs} has a row for {line[0]} without a time" for line in table[1:] if not line[timed]]
    found += [f"{docs} does not mention cache={name}" for name in config.names("cache") if f"`{name}`" not in text]
    if not docs.with_suffix(".png").exists():
        found.append(f"there is no picture {docs.with_suffix('.png')}")
    return found


def setups(options: argparse.Namespace) -> list[CacheSetup]:
    """The two runs; a smoke test has the first one, small."""
    machine, versions = here()
    tiny = options.smoke
    mini = CacheSetup(
        model="mini",
        tasks=("copy", "latin") if tiny else tuple(TASKS),
        prompts=2 if tiny else options.prompts,
        seed=options.seed,
        max_new_tokens=32,
        block_length=8,
        batch=8,
        threads=options.threads,
        machine=machine,
        versions=versions,
        parallel={"name": "threshold", "threshold": 0.9},
        foreseen={"name": "random_order", "steps": 16},
    )
    large = replace(
        mini,
        model="llada-157m",
        tasks=(RANDOM_WORDS,),
        prompts=1,
        max_new_tokens=256,
        block_length=32,
        batch=1,
        parallel={"name": "fixed", "steps": 64},
        foreseen={"name": "random_order", "steps": 64},
        prompt_length=768,
        max_steps=16,
        every=3,
    )
    return [mini] if tiny else [large, mini]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog=COMMAND,
        description="Run every cache on mini and on random weights; write the table and picture of docs/caches.md.",
        epilog="A cut run resumes from the results in --output. Exit status: 0; 1: --check found the document stale;"
        " 2: a mistake in the arguments",
    )
    add = parser.add_argument
    add("--prompts", type=positive, default=8, metavar="N", help="held-out prompts per task of mini (8)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts and of methods that draw (0)")
    add("--threads", type=positive, default=1, metavar="N", help="of torch (1)")
    add("--docs", type=Path, default=DOCS, metavar="FILE", help="document to write")
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"results, kept until deleted ({OUTPUT})")
    add("--smoke", action="store_true", help="mini alone, two prompts for each of two tasks: does it run?")
    add("--check", action="store_true", help="measure nothing: say whether caches are missing")
    return parser.parse_args(arguments)


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parse(arguments)
    if options.check:
        found = stale(options.docs)
        print("\n".join(found) or f"{options.docs} has every cache")
        return int(bool(found))
    written = write(options.docs, options.output, setups(options))
    print(written)
    return 0


def write(docs: Path, output: Path, chosen: Sequence[CacheSetup]) -> str:
    """Measure what is not stored yet, then replace the document's section; returns the section."""
    markdown.read(docs, SECTION)  # a mistake shows before the work
    require_matplotlib()
    torch.set_num_threads(chosen[0].threads)
    results = []
    for setup in chosen:
        if setup.model == "llada-157m":
            base = Sampler(llada_157m())
        else:
            base = Sampler.from_pretrained(setup.model, device="cpu")
        found = store(output / "results.jsonl", setup)
        results.append((setup, run(base, setup, found, Console(stderr=True))))
    section = content(results)
    picture, (first, rows), (last, judged) = docs.with_suffix(".png"), results[0], results[-1]
    files.write(picture, draw(rows, judged, first.model, last.model))
    section = f"![Agreement against time per step]({picture.name})\n\n{section}"
    files.write(docs, markdown.fill(markdown.read(docs, SECTION), SECTION, section))
    return section


if __name__ == "__main__":
    sys.exit(main())
