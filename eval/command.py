"""`dllm-eval`: run configurations on tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from dllm_sampler.cli import terminal
from dllm_sampler.cli.explain import LIMITS, explain
from dllm_sampler.cli.help import check_topics
from dllm_sampler.cli.terminal import Column, ending, written
from dllm_sampler.cli.user_files import about, choices, choices_of, with_config_dir
from dllm_sampler.errors import UserError, counted
from dllm_sampler.eval.jobs import EVAL, Job, Options, jobs
from dllm_sampler.eval.passes import title
from dllm_sampler.eval.protocols import programs
from dllm_sampler.eval.report.headline import METHOD, interval
from dllm_sampler.host.files import write as write_file
from dllm_sampler.host.version import __version__
from dllm_sampler.options import Options as Shared
from dllm_sampler.options import pages

if TYPE_CHECKING:
    from dllm_sampler.eval.report.data import Comparison, Figures

LONG = 40  # most runs that the table has a row for; above, it has a row per configuration
SURE = f"n: number of samples. {METHOD[0].upper()}{METHOD[1:]}."
FRONT = (
    "* Pareto front: no other configuration is at least as good in both score and tokens/forward, and better in one."
    " Intervals may overlap."
)
USAGE = """\
Run samplers on tasks: every combination of the values that the words give.

Usage: dllm-eval [-m] [NAME=VALUE,VALUE ...]

  dllm-eval scheduler=threshold,localleap cache=none,dual task=mini task.operation=sort
  dllm-eval scheduler='glob(*)' task.operation=copy,shuffle task.count=40 workers=2
  dllm-eval suite=compare report=report.html
  dllm-eval suite=protocol/fast-dllm model=llada-8b task=gsm8k method=prefix
  dllm-eval task=jsonl task.file=mine.jsonl task.metric=contains
  dllm-eval model=llada-8b suite=compare hydra/launcher=slurm workers=16
  accelerate launch -m dllm_sampler.eval scheduler=threshold model=llada-8b

Each configuration has a directory in output=FOLDER. Finished samples are stored:
the same command resumes an interrupted run. dllm-report makes a page of it.
"""
ENDING = """\
Other groups and options are those of dllm-sample --help. dllm-eval --help task=NAME,
or scheduler=NAME ..., explains one. Tasks of lm-evaluation-harness have a command of
their own: python -m dllm_sampler.eval.lm_eval (docs/tasks.md).
Flags: -h, --help   --version   --config-dir DIR   -m, --multirun (is always on)
Configurations that cannot run are listed at the end. Exit status: 0; 2 after a mistake
in the input or if nothing could run (with a message on stderr); 130 after Ctrl-C.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-eval` and return its exit status."""
    given = list(sys.argv[1:] if words is None else words)
    return ending("dllm-eval", lambda: with_config_dir(given, _run), "interrupted. Rerun the command to resume.")


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        if named := [word for word in words if word.partition("=")[0] in EVAL.groups and "=" in word]:
            chosen = [choice for word in named for choice in choices_of(word)]
            for group, name in chosen:
                explain(Console(), group, name)
            return 0
        check_topics("dllm-eval", words)
        print(USAGE)
        for group in ("task", "suite", "suite/protocol"):
            for name in choices(group):
                kind, _, inner = group.partition("/")
                terminal.show(f"  {kind}={f'{inner}/' * bool(inner)}{name}: {about(group, name)}")
        print()
        for name, default, what in pages(Options):
            if name not in Shared.__dataclass_fields__:
                terminal.show(f"  {name}={'null' if default is None else written(default)}: {what}")
        print("\nLimits:")
        for limit in LIMITS.values():
            terminal.show(f"  {limit}")
        print(f"\n{ENDING}", end="")
        return 0
    if "--version" in words:
        print(f"dllm-eval {__version__}")
        return 0
    words = [word for word in words if word not in ("-m", "--multirun")]
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UserError("option-syntax", f"'{word}' is not NAME=VALUE. See dllm-eval --help.")
    found = jobs(words)
    # These import torch and transformers: seconds that the page above and a mistake do not wait for.
    from dllm_sampler.eval.folders import RunFolder
    from dllm_sampler.eval.launch import accelerated, launch
    from dllm_sampler.eval.report.command import check, write
    from dllm_sampler.eval.report.data import load, run_folders
    from dllm_sampler.eval.report.markov import drawn

    if any(job.task.get("run_code") for job in found):
        print(programs.notice(), file=sys.stderr)
    report, output = found[0].options.report, Path(found[0].options.output).expanduser()
    page = None if report is None else check("report", report)
    if page is not None:
        for folder in run_folders([output]):
            RunFolder(folder).records()  # the report covers the folder: a damaged run shows before hours of work
    refused = launch(words, found, Console(stderr=True))
    if len(refused) == len(found):
        raise UserError("runs-refused", " ".join(dict.fromkeys(refused.values())))
    share = accelerated()
    if share is None or share.rank == 0:
        comparison = load([job.folder for job in found])
        show(found, refused, comparison, Console())
        for sentence in stopped(comparison):
            print(sentence, file=sys.stderr)
        if page is not None:
            print(write([output], page), file=sys.stderr)
        elif comparison.together:
            for name, content in drawn(load([output])).items():
                file = output / f"{name}.png"
                write_file(file, content)
                print(file, file=sys.stderr)
    return 0


def number(value: float | None, form: str, factor: float = 1, unit: str = "") -> str:
    """Return `factor * value` in the format `form`, followed by the unit. Returns "" for None."""
    return "" if value is None else f"{factor * value:{form}}{unit}"


def show(found: Sequence[Job], refused: dict[str, str], comparison: Comparison, console: Console) -> None:
    """Print a table of the runs' figures, and the reason of each configuration that cannot run.

    The table has a row per run, or a row per configuration over all tasks if there are more than `LONG` runs.
    """
    if len(found) <= LONG:
        rows = [(m.label, task, run.figures) for m in comparison.methods for task, run in m.runs.items()]
    else:
        rows = [(label, "all", figures) for label, figures in comparison.figures["all tasks"].items()]
    views = {task: task if task in comparison.views else "all tasks" for _, task, _ in rows}
    several = len(comparison.methods) > 1
    best = {
        task: comparison.front(view, "answer_tokens_per_forward") if several else () for task, view in views.items()
    }
    error = comparison.together[:1]  # what a task says first of all answers together
    each = [figures for _, _, figures in rows]

    def column(title: str, rank: int, text: Callable[[Figures], str]) -> Column:
        return Column(title, [text(figures) for figures in each], rank)

    columns = [
        Column("  configuration", [("* " if m in best[task] else "  ") + m for m, task, _ in rows], words=True),
        Column("task", [task for _, task, _ in rows], 0 if len(views) > 1 else 9, words=True),
        column("n", 5, lambda one: f"{one['samples']:.0f}"),
        column("score", 0, lambda one: f"{100 * (one['score'] or 0):.1f}"),
        column("95 %", 4, interval),
        *(column(name.replace("_", " "), 2, lambda one, n=name: number(one.get(n), ".4f")) for name in error),
        *(
            column(title(name), 3, lambda one, n=name: number(one.get(n), ".3g"))
            for name in chosen_passes(comparison.passes, each)
        ),
        column("valid", 1, lambda one: number(one["validity"], ".1f", 100)),
        column("perplexity", 2, lambda one: number(one.get("perplexity"), ".4f")),
        column("tokens/forward", 0, lambda one: f"{one['answer_tokens_per_forward']:.2f}"),
        column("forwards", 7, lambda one: f"{one['nfe']:.1f}"),
        column("tokens/s", 6, lambda one: f"{one['tokens_per_second']:.0f}"),
        column("oracle's share", 8, lambda one: number(one["oracle_share"], ".0f", 100, " %")),
    ]
    narrow = terminal.show_table(
        [one for one in columns if one.title not in ("valid", "perplexity") or any(one.cells)], console
    )
    if rows:
        console.print(Text(f"{FRONT} {SURE}" if several else SURE), soft_wrap=True)
    if narrow:
        console.print(Text(f"Left out, since the terminal is narrow: {', '.join(narrow)}."), soft_wrap=True)
    show_published(comparison, console)
    if comparison.unsaid:
        console.print(terminal.text(comparison.unsaid, console), soft_wrap=True)
    for label, reason in comparison.refused:
        console.print(terminal.text(f"cannot run {label}: {reason}", console), soft_wrap=True)
    if comparison.missing:
        few = f"{counted(comparison.missing, 'sample')} {'is' if comparison.missing == 1 else 'are'}"
        console.print(Text(f"{few} missing. Rerun the command to resume."), soft_wrap=True)
    done = counted(len(found) - len(refused), "run")
    console.print(terminal.text(f"{done} in {found[0].options.output}", console), soft_wrap=True)


def stopped(comparison: Comparison) -> Iterator[str]:
    """Yield a note for each configuration with answers that stopped at `max_steps`."""
    for method in comparison.methods:
        reasons = [record.finish_reason for run in method.runs.values() for record in run.records]
        if count := reasons.count("max_steps"):
            yield (
                f"{method.label}: {count} of {len(reasons)} answers stopped at max_steps before they were complete."
                " Set a larger max_steps, or null."
            )


def chosen_passes(names: Sequence[str], each: Sequence[Figures]) -> list[str]:
    """Return the names of the pass measures to show: the largest k, the largest budget, and distinct answers.

    A measure is shown only if all runs with several samples for each prompt have it.
    """
    several = [figures for figures in each if any(name in figures for name in names)]
    shared = [name for name in names if all(name in figures for figures in several)]
    return list({name.rpartition("_")[0]: name for name in shared}.values())


def show_published(comparison: Comparison, console: Console) -> None:
    """Print published figures beside those of runs under a protocol, and a warning on large differences."""
    from dllm_sampler.eval.report import published  # imports the runs' reader, which the page above does not wait for

    if rows := published.beside(comparison):
        cells = list(zip(*(row.cells for row in rows), strict=True))
        ranks = (4, 2, 0, 0, 0, 3, 1, 5, 6, 7, 8)
        words = zip(published.HEAD, cells, ranks, strict=True)
        terminal.show_table([Column(head, column, rank, words=rank > 0) for head, column, rank in words], console)
        for sentence in published.warnings(rows):
            console.print(Text(sentence), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
