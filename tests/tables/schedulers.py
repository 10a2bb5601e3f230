"""Every method on `mini`, at its defaults: writes a table and a picture into docs/schedulers.md, all figures beside it.

`python -m tests.tables.schedulers [--prompts 40] [--tasks NAME ...] [--seed 0] [--check]`; a cut run resumes.
"""

from __future__ import annotations

import argparse
import csv
import io
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.options import positive
from dllm_sampler import __version__, config
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval import curves
from dllm_sampler.eval.report.figure import require_matplotlib
from dllm_sampler.eval.tasks.mini import CANVAS, held_out_prompts
from dllm_sampler.host import files
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from tests.reproduced import decode
from tests.tables import markdown
from tests.tables.answers import HARD, Tally
from tests.tables.points import BEST, BOUND, ORACLE, PLAIN, Point, label
from tests.tables.store import Plugins, Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECTION = "scheduler table"
HEAD = ("method", "exact match", "hard tasks", "tokens per forward", "ms per token")  # of the CSV file
COMMAND = "python -m tests.tables.schedulers"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "schedulers.md"
OUTPUT = Path("outputs/scheduler-table")
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
ONE_PER_STEP = ("fixed", "origin", "budgeted", "pc", "certainty", "rcr", "remdm")  # until told how many steps
NEEDS = {
    "learn2pd": "needs a filter",
    "apd": "needs a verifier",
    "svdd": "needs a reward",
    "linear_spec": "needs a causal context",
    "s2d2": "needs a block-causal model",
    "s2d2_editing": "needs a block-causal model",
}  # methods that may lack what no default can give
SCHEMA = 1

Answer = Callable[[list[str]], tuple[Result, float | None]]  # prompts -> answers, and the seconds they took


@dataclass(frozen=True)
class Setup:
    """What is run, and where: figures of two setups are never mixed in one table."""

    model: str
    tasks: tuple[str, ...]
    prompts: int
    seed: int
    max_new_tokens: int
    block_length: int
    batch: int
    threads: int
    machine: str
    versions: str


@dataclass(frozen=True)
class Figures:
    """The answers of a method to a task's prompts, and the time per token of each batch (none for the oracle)."""

    tally: Tally
    milliseconds: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """The figures of one method."""

    method: str
    all: Tally
    hard: Tally | None
    milliseconds: float | None  # per token, the median batch

    @property
    def point(self) -> tuple[float, float]:
        """Tokens per forward, and exact match in %."""
        return self.all.tokens_per_forward, self.all.exact


def methods(setup: Setup) -> dict[str, Plugins]:
    """The plug-ins of each row: every scheduler, then blocks and stops that are methods.

    AdaBlock may end a block at a comma, which `mini` has for the line break of other models.
    """
    blocks, steps = {"name": "fixed", "length": setup.block_length}, max(1, setup.max_new_tokens // 4)
    masked = [name for name in config.names("scheduler") if name != "discrete_ddim"]  # that one has no use for masks
    found: dict[str, Plugins] = {name: {"scheduler": name} for name in masked}
    found |= {f"{name} steps={steps}": {"scheduler": {"name": name, "steps": steps}} for name in ONE_PER_STEP}
    inner = {"_target_": config.entry("scheduler", "fixed").settings["_target_"], "steps": steps}
    ada = {"name": "adablock", "length": setup.block_length, "delimiters": [vocabulary()[", "]]}
    short = max(1, setup.block_length // 4)
    found |= {
        f"eoser inner.steps={steps}": {"scheduler": {"name": "eoser", "inner": inner}},
        "fixed steps=1": {"scheduler": {"name": "fixed", "steps": 1}},
        "threshold blocks=adablock": {"scheduler": "threshold", "blocks": ada},
        "ascending blocks=ascending": {"scheduler": "ascending", "blocks": "ascending"},
        "fixed stop=prophet": {"scheduler": "fixed", "stop": "prophet"},
        "fixed stop=end_of_text": {"scheduler": "fixed", "stop": "end_of_text"},
        **{
            f"{rule} blocks={name} blocks.length={short}": {
                "scheduler": rule,
                "blocks": {"name": name, "length": short},
            }
            for rule in ("threshold", "entropy")
            for name in ("fixed", "multi_block")
        },
        ORACLE: {"scheduler": ORACLE},
    }
    return {name: {"blocks": blocks, **plugins} for name, plugins in found.items()}


def settings(plugins: Plugins) -> Plugins:
    """The plug-ins with every default spelt out: a changed default is another measurement."""
    full = {}
    for group, spec in plugins.items():
        given = {"name": spec} if isinstance(spec, str) else spec
        known = {} if given["name"] == ORACLE else config.entry(group, given["name"]).settings
        full[group] = {**known, **given}
    return full


def store(path: Path, setup: Setup) -> Store[Figures]:
    """What is measured already: a method's answers to a task, and their times."""

    def read(entry: Mapping[str, Any]) -> Figures:
        return Figures(Tally(**entry["sums"]), tuple(entry["ms_per_token"]))

    def written(figures: Figures) -> dict[str, Any]:
        return {"sums": asdict(figures.tally), "ms_per_token": figures.milliseconds}

    about = {name: value for name, value in asdict(setup).items() if name != "tasks"}
    return Store(path, SCHEMA, about, settings, read, written)


def measure(answer: Answer, task: str, setup: Setup) -> Figures:
    """The answers to a task's prompts, batch by batch."""
    prompts, parts, pace = held_out_prompts(TASKS[task], setup.prompts, setup.seed), [], []
    for start in range(0, len(prompts), setup.batch):
        part = prompts[start : start + setup.batch]
        result, seconds = answer(part)
        parts.append(Tally.of(TASKS[task], part, result))
        if seconds is not None:
            pace.append(1000 * seconds / max(parts[-1].tokens, 1))
    return Figures(Tally.total(parts), tuple(pace))


def answering(base: Sampler, plugins: Plugins, setup: Setup) -> Answer:
    """What `measure` calls for a method. The time is that of the process: on a shared machine waiting is left out."""
    tokens, seed = setup.max_new_tokens, setup.seed
    if plugins["scheduler"] == ORACLE:
        rest = {group: spec for group, spec in plugins.items() if group != "scheduler"}

        def reproduce(prompts: list[str]) -> tuple[Result, float | None]:
            reference, oracle = decode(
                base.denoiser, prompts, max_new_tokens=tokens, seed=seed, tokenizer=base.tokenizer, **rest
            )
            assert reference.texts == oracle.texts and bool((oracle.nfe <= reference.nfe).all())
            return oracle, None  # it needs the answer first: there is no time to speak of

        return reproduce
    sampler = Sampler(base.denoiser, tokenizer=base.tokenizer, **plugins)

    def timed(prompts: list[str]) -> tuple[Result, float | None]:
        start = time.process_time()
        result = sampler.generate(prompts, max_new_tokens=tokens, seed=seed)
        return result, time.process_time() - start

    return timed


def run(base: Sampler, setup: Setup, store: Store[Figures], console: Console) -> tuple[list[Row], list[str]]:
    """Measure what the store does not have. Returns rows, and the methods that lack something.

    All methods answer one task before the next: a machine that gets slower or faster does so for all of them.
    """
    answers, lacking, chosen = {}, [], methods(setup)
    for method, plugins in chosen.items():
        try:
            if any(store.find(plugins, task) is None for task in setup.tasks):
                answers[method] = answering(base, plugins, setup)
        except UserError:
            if method not in NEEDS:
                raise
            lacking.append(method)
    warm = held_out_prompts(TASKS[setup.tasks[0]], min(setup.batch, setup.prompts))
    work = [(task, method) for task in setup.tasks for method in answers]
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(work))
        for done, (task, method) in enumerate(work):
            progress.update(shown, completed=done, description=f"{task}: {method}")
            if done < len(answers):
                answers[method](warm)  # the first call pays for what later ones reuse
            if store.find(chosen[method], task) is None:
                store.add(chosen[method], task, measure(answers[method], task, setup))
    rows = []
    for method, plugins in chosen.items():
        found = {task: store.find(plugins, task) for task in setup.tasks}
        if method not in lacking:
            rows.append(row(method, {task: figures for task, figures in found.items() if figures}))
    return rows, lacking


def row(method: str, found: Mapping[str, Figures]) -> Row:
    """A method's figures from those of each task."""

    hard = [figures.tally for task, figures in found.items() if task in HARD]
    pace = [time for figures in found.values() for time in figures.milliseconds]
    everything = Tally.total(figures.tally for figures in found.values())
    return Row(method, everything, Tally.total(hard) if hard else None, median(pace) if pace else None)


def front(rows: Sequence[Row]) -> set[str]:
    """Return the methods that no other beats in both exact match and tokens per forward; the oracle is no method."""
    return curves.front({row.method: row.point for row in rows if row.method != ORACLE})


def draw(found: Sequence[Row]) -> bytes:
    """A PNG file: all methods, and where several crowd near the oracle, that corner enlarged next to them."""
    from matplotlib.figure import Figure

    rows = [Point(row.method, row.point) for row in found]
    figure, best, near = Figure(figsize=(15, 7.5), dpi=120, layout="constrained"), front(found), crowd(rows)
    wide, *close = figure.subplots(1, 2, width_ratios=(5, 3)) if near else [figure.subplots()]
    for axes in (wide, *close):
        _points(axes, rows, best)
    low, high = (bound(row.point[0] for row in rows) for bound in (min, max))
    wide.set_xscale("log", base=2)
    ticks = [tick for tick in TICKS if low / 2 <= tick <= 2 * high]
    wide.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    wide.set_xlim(low / 1.5, high * 1.5)
    wide.margins(y=0.12)
    wide.set_ylabel("exact match, %")
    wide.legend(loc="lower left", frameon=False)
    for axes in close:
        for which, limit in enumerate((axes.set_xlim, axes.set_ylim)):
            low, high = (bound(row.point[which] for row in near) for bound in (min, max))
            limit(low - 0.2 * (high - low), high + 0.2 * (high - low))
        axes.set_title("the frame near the oracle, enlarged", fontsize=10)
        wide.indicate_inset(bounds=axes.viewLim.bounds, edgecolor=PLAIN, alpha=0.5)
    figure.draw_without_rendering()  # labels are placed by what their text measures
    label(wide, [row for row in rows if row not in near], best, rows)
    for axes in close:
        label(axes, near, best, near)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def crowd(rows: Sequence[Point]) -> list[Point]:
    """The methods that come near the oracle: at least half its tokens per forward, at most 10 points less exact."""
    oracle = next((row for row in rows if row.method == ORACLE), None)
    if oracle is None:
        return []
    rate, exact = oracle.point
    found = [row for row in rows if row is not oracle and row.point[0] >= rate / 2 and row.point[1] >= exact - 10]
    return found if len({row.point for row in found}) > 3 else []


def _points(axes: Axes, rows: Sequence[Point], best: set[str]) -> None:
    """Methods, the front, and the oracle."""
    for row in rows:
        if row.method == ORACLE:
            axes.axvline(
                row.point[0], color=BOUND, linewidth=1, linestyle="--", label="oracle: one per step, reproduced"
            )
            axes.plot(*row.point, "*", color=BOUND, markersize=12, zorder=3)
        else:
            axes.plot(*row.point, "o", color=BEST if row.method in best else PLAIN, markersize=5, zorder=3)
    edge = sorted(row.point for row in rows if row.method in best)
    axes.step(*zip(*edge, strict=True), where="pre", color=BEST, linewidth=1, alpha=0.6, label="Pareto front")
    axes.set_xlabel("tokens per forward")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def content(setup: Setup, rows: Sequence[Row], document: Path) -> str:
    """Return the section of the document: the picture, the Pareto front, and how to read them."""
    best, alike = front(rows), defaultdict[tuple[str, ...], list[str]](list)
    for row in sorted(rows, key=lambda row: row.point):
        if row.method in {*best, ORACLE}:
            alike[tuple(figures(row)[:-1])].append(row.method if row.method == ORACLE else f"`{row.method}`")
    lines = [[", ".join(names), *cells] for cells, names in alike.items()]
    hard = [name for name in setup.tasks if name in HARD]
    count = setup.prompts * len(setup.tasks)
    notes = [
        "The methods that no other beats in both exact match and tokens per forward, and an oracle"
        f" ([all figures]({table_of(document).name})):",
        f"{setup.prompts} held-out prompts for each task of `{setup.model}`; {setup.max_new_tokens} tokens"
        f" in blocks of {setup.block_length}, greedy, no cache, seed {setup.seed}. Standard error of exact match:"
        f" {_error(98, count):.1f} points at 98 %, {_error(80, count):.1f} at 80 %."
        + (f" Tokens of hard tasks must agree with one another: {', '.join(hard)}." if hard else "")
        + " The oracle knows the answer of `fixed`: each step commits every prediction that equals it."
        f" {setup.machine}, {setup.versions}. Made by `{COMMAND}`.",
    ]
    picture = f"![Exact match against tokens per forward]({document.with_suffix('.png').name})"
    return "\n\n".join([picture, notes[0], markdown.table(HEAD[:-1], lines), *notes[1:]])


def table_of(document: Path) -> Path:
    """Return the CSV file with the figures of all methods, beside the document."""
    return document.with_suffix(".csv")


def all_figures(rows: Sequence[Row], lacking: Sequence[str]) -> str:
    """Return the text of the CSV file. A method that cannot run has its reason in place of figures."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows([row.method, *figures(row)] for row in sorted(rows, key=lambda row: row.point))
    writer.writerows([method, NEEDS[method], *[""] * (len(HEAD) - 2)] for method in lacking)
    return out.getvalue()


def _error(share: float, count: int) -> float:
    """Standard error of a share, both in %."""
    return (share * (100 - share) / count) ** 0.5


def figures(row: Row) -> list[str]:
    """Return the cells of a method after its name."""
    shares = (f"{tally.exact:.1f}" if tally else "" for tally in (row.all, row.hard))
    time = "" if row.milliseconds is None else f"{row.milliseconds:.2f}"
    return [*shares, f"{row.all.tokens_per_forward:.2f}", time]


def stale(docs: Path, setup: Setup) -> list[str]:
    """Return one sentence for each thing that the CSV file lacks or has too much of. Figures are not compared."""
    table, picture = table_of(docs), docs.with_suffix(".png")
    if not table.exists():
        return [f"there is no table {table}"]
    head, *lines = csv.reader(table.read_text(encoding="utf-8").splitlines())
    have, want = {line[0] for line in lines}, set(methods(setup))
    found = [f"{table} has no row for {name}" for name in sorted(want - have)]
    found += [f"{table} has a row for {name}, which is not a method" for name in sorted(have - want)]
    if tuple(head) != HEAD:
        found.append(f"{table} has other columns")
    untimed = [name for name, *told, time in lines if name != ORACLE and all(told) and not time]
    found += [f"{table} has a row for {name} without a time" for name in untimed]
    if not picture.exists():
        found.append(f"there is no picture {picture}")
    return found


def here() -> tuple[str, str]:
    """The machine and the versions, as the table states them."""
    try:
        found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    machine = found[1].strip() if found else platform.processor() or platform.machine()
    return machine, f"torch {torch.__version__}, Python {platform.python_version()}, dllm_sampler {__version__}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog=COMMAND,
        description="Run every method on mini and write its figures beside docs/schedulers.md, and the best into it.",
        epilog="A cut run resumes from the results in --output. Exit status: 0; 1: --check found the document stale;"
        " 2: a mistake in the arguments",
    )
    add = parser.add_argument
    add("--model", default="mini", help="a model name or checkpoint folder")
    add("--prompts", type=positive, default=40, metavar="N", help="held-out prompts per task (40)")
    add("--tasks", nargs="+", default=list(TASKS), metavar="NAME", help="tasks of mini (all)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts and of methods that draw (0: the card's)")
    add("--max-new-tokens", type=positive, default=CANVAS, metavar="N", help=f"canvas ({CANVAS})")
    add("--block-length", type=positive, default=CANVAS, metavar="N", help=f"of blocks=fixed ({CANVAS})")
    add("--batch", type=positive, default=8, metavar="N", help="prompts decoded together (8)")
    add("--threads", type=positive, default=1, metavar="N", help="of torch (1)")
    add("--docs", type=Path, default=DOCS, metavar="FILE", help="document to write; picture and CSV file go beside it")
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"results, kept until deleted ({OUTPUT})")
    add("--check", action="store_true", help="measure nothing: say whether rows or columns are missing")
    return parser.parse_args(arguments)


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parse(arguments)
    for name in options.tasks:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    machine, versions = here()
    setup = Setup(
        model=options.model,
        tasks=tuple(dict.fromkeys(options.tasks)),
        prompts=options.prompts,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        block_length=options.block_length,
        batch=options.batch,
        threads=options.threads,
        machine=machine,
        versions=versions,
    )
    if options.check:
        found = stale(options.docs, setup)
        print("\n".join(found) or f"{options.docs} has every method")
        return int(bool(found))
    written = write(options.docs, options.output, setup)
    print(written)
    return 0


def write(docs: Path, output: Path, setup: Setup) -> str:
    """Measure what is not stored yet, then replace the document's section and its picture; returns the section."""
    markdown.read(docs, SECTION)  # a mistake shows before the work
    require_matplotlib()
    torch.set_num_threads(setup.threads)
    base = Sampler.from_pretrained(setup.model, device="cpu")
    rows, lacking = run(base, setup, store(output / "results.jsonl", setup), Console(stderr=True))
    section = content(setup, rows, docs)
    files.write(docs.with_suffix(".png"), draw(rows))
    files.write(table_of(docs), all_figures(rows, lacking))
    files.write(docs, markdown.fill(markdown.read(docs, SECTION), SECTION, section))
    return section


if __name__ == "__main__":
    sys.exit(main())
