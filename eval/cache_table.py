"""Every cache on `mini` and on 157 million random weights: writes the tables and the picture of docs/caches.md.

`python -m dllm_sampler.eval.cache_table [--smoke] [--check]`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from dllm_sampler import config
from dllm_sampler.core import files
from dllm_sampler.eval import cache_plot, markdown, scheduler_plot
from dllm_sampler.eval.arguments import Parser, command, positive
from dllm_sampler.eval.cache_runs import APART, RANDOM_WORDS, CacheSetup, Row, caches, run, store
from dllm_sampler.eval.scheduler_table import here
from dllm_sampler.eval.untrained import llada_157m
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.tasks import TASKS

SECTION = "cache table"
HEAD = (
    "cache",
    "exact match",
    "tokens as `none`",
    "KL",
    "positions",
    "whole steps",
    "ms per step",
    "`none` = 1",
    "bytes per token",
)
COMMAND = "python -m dllm_sampler.eval.cache_table"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "caches.md"
OUTPUT = Path("outputs/cache-table")


def cells(row: Row, judged: bool) -> list[str]:
    """A line of the table; `judged`: answers can be right or wrong."""
    found = row.figures
    exact = [f"{row.exact:.1f}"] if judged else []
    stored = not row.cache.startswith("none")
    return [
        f"`{row.cache}`",
        *exact,
        f"{row.agreement:.1f}" if stored else "",
        f"{row.divergence:.1e}" if stored else "",
        f"{row.share:.1f}",
        f"{100 * found.whole / found.steps:.0f}",
        f"{row.milliseconds:.1f}",
        f"{row.ratio:.2f}" if stored else "",
        f"{found.bytes_per_token:.0f}",
    ]


def content(results: Sequence[tuple[CacheSetup, Sequence[Row]]]) -> str:
    """What stands in the document: the tables, and what one must know to read them."""
    parts = []
    for setup, rows in results:
        judged = setup.tasks != (RANDOM_WORDS,)
        head = HEAD if judged else (HEAD[0], *HEAD[2:])
        ordered = sorted(rows, key=lambda row: row.ratio)
        parts += [_about(setup), markdown.table(head, [cells(row, judged) for row in ordered])]
        slow = [f"`{row.cache}` ({row.share:.0f} % of the positions)" for row in ordered if row.ratio > 1]
        if slow:
            parts.append(f"Slower than no cache here: {', '.join(slow)}.")
    setup = results[0][0]
    threads = f"{setup.threads} thread{'s' * (setup.threads > 1)} (`OMP_NUM_THREADS={setup.threads}`)"
    return "\n\n".join(
        [
            *parts,
            "*Tokens as `none`*: tokens in % that equal those of a generation without a cache at the same place, over"
            " the latter's answer up to its first end token. *KL*: mean divergence of a prediction with the cache from"
            " that without it on the same canvas, in nats, over the masks of the block that both predict; the canvases"
            " are those that the generation with the cache comes through, so that one early deviation does not count"
            " at each later step. *Positions*: computed, in % of all. *Whole steps*: those that compute every position,"
            " in %.",
            f"*ms per step*: process time, the mean of all steps (a median would hide the refreshes), {threads}."
            " *`none` = 1*: the same over the time without a cache, measured in turn on the same canvases. *Bytes per"
            " token*: everything that the live cache holds, over the columns of the canvas.",
            f"`dkv_greedy` needs `scheduler=random_order` and is compared with `none random_order`."
            f" {', '.join(f'`{name}`' for name in APART)} are not in the tables: the first two are for block-causal"
            " models and refused by these, the last is `none` for them.",
            f"{setup.machine}, {setup.versions}. Made by `{COMMAND}`.",
        ]
    )


def _about(setup: CacheSetup) -> str:
    """What is run, in a paragraph."""
    scheduler, foreseen = (
        " ".join(f"{key}={value}" if key != "name" else f"scheduler={value}" for key, value in plugins.items())
        for plugins in (setup.parallel, setup.foreseen)
    )
    common = f"canvas of {setup.max_new_tokens} tokens in blocks of {setup.block_length}, batch {setup.batch}"
    if setup.tasks == (RANDOM_WORDS,):
        length = setup.prompt_length + setup.max_new_tokens
        return (
            f"**{setup.model}, {length} tokens.** Random weights, float32: times are real, answers mean nothing, and"
            f" agreement says little of a trained model. A prompt of {setup.prompt_length} random words, a {common};"
            f" `{scheduler}` (`{foreseen}` for `dkv_greedy`), as many tokens per step as a trained model may commit,"
            f" and the first {setup.max_steps} steps of it, which open {_openings(setup)} blocks. One step in"
            f" {setup.every} is repeated without a cache."
        )
    return (
        f"**{setup.model}.** {setup.prompts} held-out prompts for each of {len(setup.tasks)} tasks, a {common};"
        f" `{scheduler}` (`{foreseen}` for `dkv_greedy`), `stop=prefix`, seed {setup.seed}. The canvas is so short and"
        " the model so small that time shows the sampler's own cost; *exact match*: right answers in %."
    )


def _openings(setup: CacheSetup) -> int:
    """Blocks that the limited steps come to, of a schedule of fixed steps."""
    per_block = setup.parallel["steps"] * setup.block_length // setup.max_new_tokens
    return -(-(setup.max_steps or 0) // per_block)


def stale(docs: Path) -> list[str]:
    """What the document lacks or has too much of, one sentence each. Figures are not compared."""
    text = markdown.read(docs, SECTION)
    section = markdown.section(text, SECTION) or ""
    tables = [table for table in markdown.tables(section) if table[0][0] == HEAD[0]]
    found = [] if len(tables) == 2 else [f"{docs} has {len(tables)} tables of caches, and should have two"]
    for table in tables:
        have, want = {line[0].strip("`") for line in table[1:]}, set(caches())
        found += [f"{docs} has no row for {name}" for name in sorted(want - have)]
        found += [f"{docs} has a row for {name}, which is no cache" for name in sorted(have - want)]
        timed = table[0].index("ms per step")
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
        description="Run every cache on mini and on random weights; write the tables and picture of docs/caches.md.",
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
    scheduler_plot.available()
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
    files.write(picture, cache_plot.draw(rows, judged, first.model, last.model))
    section = f"![Agreement against time per step]({picture.name})\n\n{section}"
    files.write(docs, markdown.fill(markdown.read(docs, SECTION), SECTION, section))
    return section


if __name__ == "__main__":
    sys.exit(main())
