"""`dllm-eval`: run configurations on tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dllm_sampler._version import __version__
from dllm_sampler.cli.ending import ending
from dllm_sampler.cli.help import choices_of
from dllm_sampler.cli.printing import about
from dllm_sampler.cli.yours import choices, trusting
from dllm_sampler.core.files import write as write_file
from dllm_sampler.errors import UserError
from dllm_sampler.eval.jobs import EVAL, Job, jobs
from dllm_sampler.eval.report.headline import METHOD, interval

if TYPE_CHECKING:
    from dllm_sampler.eval.report.data import Comparison

LONG = 40  # runs; a table of more says nothing
SURE = f"n: samples. {METHOD[0].upper()}{METHOD[1:]}."
FRONT = (
    "* Pareto front: no other configuration has a score and tokens/forward at least as high, and one of them higher;"
    " intervals may overlap."
)
USAGE = """\
Run samplers on tasks: every combination of the values that the words give.

Usage: dllm-eval [-m] [NAME=VALUE,VALUE ...]

  dllm-eval scheduler=threshold,localleap cache=none,dual task=mini task.operation=sort
  dllm-eval scheduler='glob(*)' task.operation=copy,shuffle task.count=40 workers=2
  dllm-eval suite=compare report=report.html
  dllm-eval task=jsonl task.file=mine.jsonl task.metric=contains
  dllm-eval model=llada-8b suite=compare hydra/launcher=slurm workers=16
  accelerate launch -m dllm_sampler.eval scheduler=threshold model=llada-8b

Each configuration has a directory in output=FOLDER. What is done is not done again:
a run that was cut off goes on where it was. dllm-report makes a page of it.
"""
ENDING = """\
Groups and options are those of dllm-sample --help, and task, suite, batch_size ...
(conf/eval.yaml). dllm-eval --help task=NAME, or scheduler=NAME ..., explains one.
Flags: -h, --help   --version   --trust-conf   -m, --multirun (is always on)
What cannot run is named at the end. Exit status: 0, or 2 after a mistake in the
input and where nothing could run (one sentence on stderr), or 130 after Ctrl-C.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-eval`; returns its exit status."""
    given = list(sys.argv[1:] if words is None else words)
    return ending("dllm-eval", lambda: trusting(given, _run), "interrupted; the same command goes on from there")


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        if named := [word for word in words if word.partition("=")[0] in EVAL.groups and "=" in word]:
            chosen = [choice for word in named for choice in choices_of(word)]
            from dllm_sampler.cli.explain import explain

            for group, name in chosen:
                explain(Console(), group, name)
            return 0
        print(USAGE)
        for group in ("task", "suite"):
            for name in choices(group):
                print(f"  {group}={name}: {about(group, name)}")
        print(f"\n{ENDING}", end="")
        return 0
    if "--version" in words:
        print(f"dllm-eval {__version__}")
        return 0
    words = [word for word in words if word not in ("-m", "--multirun")]
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UserError(f"cannot make sense of '{word}': settings are written NAME=VALUE, see dllm-eval --help")
    found = jobs(words)
    # These import torch and transformers: seconds that the page above and a mistake do not wait for.
    from dllm_sampler.eval.launch import accelerated, launch
    from dllm_sampler.eval.report.command import check, write
    from dllm_sampler.eval.report.data import load
    from dllm_sampler.eval.report.markov import drawn

    report = found[0].options.report
    if report is not None:
        check(report)
    refused = launch(words, found, Console(stderr=True))
    if len(refused) == len(found):
        raise UserError(next(iter(refused.values())))
    share = accelerated()
    if share is None or share.rank == 0:
        comparison = load([job.folder for job in found])
        show(found, refused, comparison, Console())
        if report is not None:
            print(write([job.folder for job in found], report), file=sys.stderr)
        elif comparison.together:
            for name, content in drawn(comparison).items():
                file = Path(found[0].options.output).expanduser() / f"{name}.png"
                write_file(file, content)
                print(file, file=sys.stderr)
    return 0


def show(found: Sequence[Job], refused: dict[str, str], comparison: Comparison, console: Console) -> None:
    """The figures of all runs, of many the figures of each configuration alone, and why some have none."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("  configuration", overflow="fold")
    error = comparison.together[:1]  # what a task says first of all answers together
    named = [name.replace("_", " ") for name in error]
    formed = any(one["validity"] is not None for one in comparison.figures["all tasks"].values())
    titles = ["task", "n", "score", "95 %", *named, *["valid"] * formed]
    titles += ["tokens/forward", "forwards", "tokens/s", "oracle's share"]
    for title in titles:
        table.add_column(title, justify="left" if title == "task" else "right", overflow="fold")
    each = comparison.figures["all tasks"]
    if len(found) <= LONG:
        rows = [(m.label, task, run.figures) for m in comparison.methods for task, run in m.runs.items()]
    else:
        rows = [(label, "all", figures) for label, figures in each.items()]
    views = {task: task if task in comparison.views else "all tasks" for _, task, _ in rows}
    several = len(comparison.methods) > 1
    best = {
        task: comparison.front(view, "answer_tokens_per_forward") if several else () for task, view in views.items()
    }
    for label, task, figures in rows:
        share = figures["oracle_share"]
        table.add_row(
            Text(("* " if label in best[task] else "  ") + label),
            Text(task),
            f"{figures['samples']:.0f}",
            f"{100 * (figures['score'] or 0):.1f}",
            Text(interval(figures)),
            *("" if (value := figures.get(name)) is None else f"{value:.4f}" for name in error),
            *["" if (valid := figures["validity"]) is None else f"{100 * valid:.1f}"] * formed,
            f"{figures['answer_tokens_per_forward']:.2f}",
            f"{figures['nfe']:.1f}",
            f"{figures['tokens_per_second']:.0f}",
            "" if share is None else f"{100 * share:.0f} %",
        )
    if not console.is_terminal:  # a file has no width
        wanted = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
        console.width = max(console.width, wanted)
    console.print(table)
    if rows:
        console.print(Text(f"{FRONT} {SURE}" if several else SURE), soft_wrap=True)
    if comparison.unsaid:
        console.print(Text(comparison.unsaid), soft_wrap=True)
    for label, reason in comparison.refused:
        console.print(Text(f"cannot run {label}: {reason}"), soft_wrap=True)
    if comparison.missing:
        few = "1 sample is" if comparison.missing == 1 else f"{comparison.missing} samples are"
        console.print(Text(f"{few} missing: the same command goes on"), soft_wrap=True)
    console.print(Text(f"{len(found) - len(refused)} runs in {found[0].options.output}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
