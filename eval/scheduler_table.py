"""Every method on `mini`, at its defaults: writes the table and the picture of docs/schedulers.md.

`python -m dllm_sampler.eval.scheduler_table [--prompts 40] [--tasks NAME ...] [--seed 0] [--check]`
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from dllm_sampler import __version__, config
from dllm_sampler.core import files
from dllm_sampler.errors import unknown
from dllm_sampler.eval import markdown, scheduler_plot
from dllm_sampler.eval.arguments import Parser, command, positive
from dllm_sampler.eval.exact_match import CANVAS, HARD
from dllm_sampler.eval.scheduler_runs import NEEDS, ORACLE, Row, Setup, front, methods, run, store
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.tasks import TASKS

SECTION = "scheduler table"
HEAD = ("method", "exact match", "easy tasks", "hard tasks", "NFE", "tokens per forward", "ms per token")
COMMAND = "python -m dllm_sampler.eval.scheduler_table"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "schedulers.md"
OUTPUT = Path("outputs/scheduler-table")


def content(setup: Setup, rows: Sequence[Row], lacking: Sequence[str], picture: str) -> str:
    """What stands in the document: picture, table, and what one must know to read it."""
    best = front(rows)
    lines = [cells(row, row.method in best) for row in sorted(rows, key=lambda row: row.point)]
    lines += [[f"`{method}`", NEEDS[method], *[""] * (len(HEAD) - 2)] for method in lacking]
    hard = [name for name in setup.tasks if name in HARD]
    easy = [name for name in setup.tasks if name not in HARD]
    steps, count = max(1, setup.max_new_tokens // 4), setup.prompts * len(setup.tasks)
    notes = [
        f"{setup.prompts} held-out prompts for each task of `{setup.model}`, the same for every method; a canvas of"
        f" {setup.max_new_tokens} tokens in blocks of {setup.block_length}, greedy, no cache, `stop=prefix`, seed"
        f" {setup.seed}. A method stands here as the options that call it, all others at their defaults; where these"
        f" mean one token per step it stands here a second time with {steps} steps. AdaBlock's delimiter is `, `,"
        " since `mini` has no line breaks.",
        "*Exact match*: right answers in %, and where several are right each of them counts; of"
        f" {count} answers, a share of 98 % has a standard error of {_error(98, count):.1f} points, one of 80 %"
        f" {_error(80, count):.1f}."
        + (f" *Hard tasks* are those whose tokens must agree with one another: {', '.join(hard)}." if hard else "")
        + (f" *Easy tasks*: {', '.join(easy)}." if easy else "")
        + " *NFE*: forwards per answer. *Tokens per forward* count up to the first end token: one per step comes out"
        " below one, because end tokens behind the answer cost steps too. Bold: no other method is as good in both"
        " exact match and tokens per forward and better in one.",
        "The *oracle* knows the answer of `fixed`, which it reproduces: each step commits every prediction that equals"
        " it. It says how far a rule could go that tells final predictions from others. It is greedy, so fewer forwards"
        " may be possible; and a method that arrives at another right answer is not bound by it.",
        f"*ms per token*: process time, median over batches of {setup.batch}, {setup.threads} thread"
        f"{'s' * (setup.threads > 1)} (`OMP_NUM_THREADS={setup.threads}`), the methods in turn task by task."
        " `mini`'s forward is so short that the column shows the sampler's own cost as much as the number of forwards;"
        " on a large model it goes with NFE.",
        f"{setup.machine}, {setup.versions}. Made by `{COMMAND}`.",
    ]
    return "\n\n".join([f"![Exact match against tokens per forward]({picture})", markdown.table(HEAD, lines), *notes])


def _error(share: float, count: int) -> float:
    """Standard error of a share, both in %."""
    return (share * (100 - share) / count) ** 0.5


def cells(row: Row, best: bool) -> list[str]:
    """A line of the table."""
    name = row.method if row.method == ORACLE else f"`{row.method}`"
    shares = (f"{tally.exact:.1f}" if tally else "" for tally in (row.all, row.easy, row.hard))
    rates = (f"{row.all.nfe / row.all.count:.1f}", f"{row.all.tokens_per_forward:.2f}")
    time = "" if row.milliseconds is None else f"{row.milliseconds:.2f}"
    return [f"**{name}**" if best else name, *shares, *rates, time]


def stale(docs: Path, setup: Setup) -> list[str]:
    """What the document lacks or has too much of, one sentence each. Figures are not compared."""
    text = markdown.read(docs, SECTION)
    head, *lines = next(iter(markdown.tables(markdown.section(text, SECTION) or "")), [[]])
    have, want = {line[0].strip("*`") for line in lines}, set(methods(setup))
    found = [f"{docs} has no row for {name}" for name in sorted(want - have)]
    found += [f"{docs} has a row for {name}, which is no method" for name in sorted(have - want)]
    if tuple(head) != HEAD:
        found.append(f"the table of {docs} has other columns")
    untimed = [name for name, *told, time in lines if name != ORACLE and all(told) and not time]
    found += [f"{docs} has a row for {name} without a time" for name in untimed]
    picture = docs.with_suffix(".png")
    if not picture.exists():
        found.append(f"there is no picture {picture}")
    named = entries(text)
    for name in config.names("scheduler"):
        if named.count(f"scheduler={name}") != 1:
            count = named.count(f"scheduler={name}") or "no"
            found.append(f"{docs} has {count} entries for scheduler={name}, and should have one")
    return found


def entries(text: str) -> list[str]:
    """The plug-ins that a document describes, as `group=name`: the first cells of its tables that name papers."""
    rows = [row for head, *rows in markdown.tables(text) if "paper" in head for row in rows]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    return [name if "=" in name else f"scheduler={name}" for name in names]


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
        description="Run every method on mini and write the table and the picture of docs/schedulers.md.",
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
    add("--docs", type=Path, default=DOCS, metavar="FILE", help="document to write; its picture goes next to it")
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"results, kept until deleted ({OUTPUT})")
    add("--check", action="store_true", help="measure nothing: say whether rows, columns or entries are missing")
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
    scheduler_plot.available()
    torch.set_num_threads(setup.threads)
    base = Sampler.from_pretrained(setup.model, device="cpu")
    rows, lacking = run(base, setup, store(output / "results.jsonl", setup), Console(stderr=True))
    picture = docs.with_suffix(".png")
    section = content(setup, rows, lacking, picture.name)
    files.write(picture, scheduler_plot.draw(rows))
    files.write(docs, markdown.fill(markdown.read(docs, SECTION), SECTION, section))
    return section


if __name__ == "__main__":
    sys.exit(main())
