"""Draws how runs of dllm-train learnt, several seeds to a line, and writes the figures into a document.

`python -m tests.tables.learning_curves "CJ-GRPO=runs/cj-0 runs/cj-1 runs/cj-2" "diffu-GRPO=runs/grpo-0 runs/grpo-1"`
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.errors import UserError
from dllm_sampler.eval.report.figure import require_matplotlib
from dllm_sampler.host import files
from tests.tables import markdown

SECTION = "rl"
COLORS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed")
COMMAND = "python -m tests.tables.learning_curves"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


@dataclass(frozen=True)
class Curve:
    """Runs of one method that differ by their seed."""

    name: str
    runs: tuple[str, ...]
    steps: tuple[int, ...]
    right: tuple[tuple[float, ...], ...]  # [run][step] share of right answers on the run's held-out prompts
    minutes: tuple[float, ...]  # of each run, or of its part after it was resumed

    @property
    def mean(self) -> list[float]:
        """Over the runs, at each step."""
        return [sum(each) / len(each) for each in zip(*self.right, strict=True)]


def curve(name: str, folders: Sequence[str]) -> Curve:
    """What the logs of some runs say.

    Raises:
        UserError: a log cannot be read, or they were measured at other steps.
    """
    steps, right, minutes = [], [], []
    for folder in folders:
        try:
            lines = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
        except OSError as error:
            raise UserError("made-up", f"{folder} holds no log of a run: {error.strerror}") from error
        measured = [line for line in lines if "eval_right" in line]
        steps.append(tuple(line["step"] for line in measured))
        right.append(tuple(line["eval_right"] for line in measured))
        minutes.append(sum(line.get("train_runtime", 0.0) for line in lines) / 60)
    if len(set(steps)) != 1 or not steps[0]:
        raise UserError("made-up", f"the runs of {name} were not measured at the same steps: {', '.join(folders)}")
    return Curve(name, tuple(folders), steps[0], tuple(right), tuple(minutes))


def draw(curves: Sequence[Curve]) -> bytes:
    """A PNG file: each method's mean over the seeds, the seeds as thin lines, and the range where these are enough."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for color, one in zip(COLORS, curves, strict=False):
        percent = [[100 * value for value in run] for run in one.right]
        low, high = ([bound(each) for each in zip(*percent, strict=True)] for bound in (min, max))
        if len(one.runs) >= markdown.ENOUGH:
            axes.fill_between(one.steps, low, high, color=color, alpha=0.15, linewidth=0)
        for run in percent:
            axes.plot(one.steps, run, color=color, linewidth=0.7, alpha=0.6)
        kind = "mean and range" if len(one.runs) >= markdown.ENOUGH else "mean"
        label = f"{one.name}: {kind} of {len(one.runs)} seeds"
        axes.plot(one.steps, [100 * value for value in one.mean], color=color, linewidth=2.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("right answers to held-out prompts, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def content(curves: Sequence[Curve]) -> str:
    """Return the mean and range over the runs of each method, before and after, in %."""
    rows = []
    for one in curves:
        each = [(run[0], run[-1], run[-1] - run[0], max(run), run[-1] - max(run)) for run in one.right]
        rows.append([f"{one.name}, {len(one.runs)} runs", *map(spread, zip(*each, strict=True))])
    minutes = "; ".join(
        f"{one.name}: {one.steps[-1]} steps, {min(one.minutes):.1f} to {max(one.minutes):.1f} minutes" for one in curves
    )
    head = ["", "before", "after", "gain", "best", "after - best"]
    kind = f"Right answers in %. Means of the runs, with the range from {markdown.ENOUGH} runs on."
    return f"{markdown.table(head, rows)}\n\n{kind} {minutes} a run."


def spread(shares: Sequence[float]) -> str:
    """Mean and range in %."""
    return markdown.spread([100 * share for share in shares], 1)


@command(COMMAND)
def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(prog=COMMAND, description="Draw how runs of dllm-train learnt; several seeds make one line.")
    parser.add_argument("curves", nargs="+", metavar="NAME=FOLDERS", help="a method, and its runs by spaces")
    parser.add_argument("--docs", type=Path, default=PAGE, metavar="FILE", help="document whose figures are replaced")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG file (the document's name with .png)")
    options = parser.parse_args(words)
    require_matplotlib()
    named: Mapping[str, str] = dict(each.split("=", 1) for each in options.curves if "=" in each)
    if len(named) < len(options.curves) or not all(map(str.split, named.values())):
        raise UserError(
            "made-up", "curves are written NAME=FOLDERS, each name once, as in 'CJ-GRPO=runs/cj-0 runs/cj-1'"
        )
    curves = [curve(name, folders.split()) for name, folders in named.items()]
    text = content(curves)
    page = markdown.read(options.docs, SECTION)
    files.write(options.picture or options.docs.with_suffix(".png"), draw(curves))
    files.write(options.docs, markdown.fill(page, SECTION, text))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
