"""Draws the README's picture: right answers against tokens per forward, for three methods and the oracle.

Run these commands (10 minutes on one core), then `python -m tests.tables.opening RUNS docs/opening.png`:

    dllm-eval scheduler=fixed,random_order scheduler.steps=32,16,8,4,2,1 HARD output=RUNS
    dllm-eval scheduler=threshold scheduler.threshold=0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.99 HARD output=RUNS

where HARD is `cache=none task=mini task.count=100 task.operation=shuffle,latin,"insert randomly","replace randomly"`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.errors import UserError
from dllm_sampler.eval.report.data import Comparison, load
from dllm_sampler.eval.report.figure import require_matplotlib

RATE = "answer_tokens_per_forward"  # as the oracle's: padding does not count
METHODS = {
    "fixed": ("fixed steps", "#6b7280", (10, 6)),
    "random_order": ("random order", "#c2410c", (6, 8)),
    "threshold": ("threshold", "#2563eb", (10, 2)),
}  # scheduler: name, colour, offset of its label in points
LABELLED = {"fixed": 0.76, "random_order": 1.6, "threshold": 3.6}  # tokens per forward near which a curve has its label
TICKS = (0.5, 1, 2, 4, 8)


def curve(found: Comparison, scheduler: str) -> list[tuple[float, float]]:
    """Return tokens per forward and the percentage of right answers of each setting, the slowest first.

    Raises:
        UserError: the runs lack the scheduler.
    """
    figures = found.figures["all tasks"]
    mine = [figures[method.label] for method in found.methods if method.scheduler == scheduler]
    points = [(one[RATE], one["score"]) for one in mine]
    known = sorted((rate, 100 * score) for rate, score in points if rate is not None and score is not None)
    if not known:
        raise UserError("samples-missing", f"The runs have no scheduler={scheduler}. Run the commands of this program.")
    return known


def draw(found: Comparison, file: Path) -> None:
    """Draw the curves into a PNG file."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for scheduler, (name, colour, offset) in METHODS.items():
        points = curve(found, scheduler)
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, linewidth=1.8)
        near = min(points, key=lambda point: abs(point[0] - LABELLED[scheduler]))
        axes.annotate(name, near, offset, textcoords="offset points", color=colour, fontweight="bold")
    oracle = found.oracle("all tasks")
    if oracle is None:
        raise UserError("samples-missing", "The runs have no oracle. Run scheduler=fixed with scheduler.steps=32.")
    rate, score = oracle[0], 100 * oracle[1]
    axes.plot([rate], [score], color="#15803d", marker="*", markersize=14, linestyle="none")
    axes.annotate("oracle", (rate, score), (10, -4), textcoords="offset points", color="#15803d", fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [str(one) for one in TICKS])
    axes.set_xlim(0.34, 14)
    axes.set_ylim(0, 105)
    axes.set_xlabel("answer tokens per forward")
    axes.set_ylabel("right answers, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    figure.savefig(file, dpi=150)


@command("tests.tables.opening")
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture of runs."""
    parser = Parser(prog="python -m tests.tables.opening", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder that dllm-eval wrote")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(arguments)
    draw(load([options.runs]), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
