"""The report's pictures as PNG files: the front, the tasks, and what dependency between tokens costs."""

from __future__ import annotations

import io
from itertools import cycle
from typing import TYPE_CHECKING, Any

from dllm_sampler.eval.report import markov
from dllm_sampler.eval.report.data import Comparison
from dllm_sampler.eval.report.figure import TITLES, draw, require_matplotlib, scale_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOW, HIGH = "#2563eb", "#c2410c"


def pictures(found: Comparison) -> dict[str, bytes]:
    """Every picture that the runs allow, by the word that its file name ends in."""
    require_matplotlib()
    drawn = {}
    if found.methods:
        drawn["front"] = draw(found, "png", ("answer_tokens_per_forward", "tokens_per_second"))
    if found.figures["all tasks"]:
        drawn["tasks"] = tasks(found)
    if all(found.figures.get(f"{level} dependency") for level in ("low", "high")):
        drawn["dependency"] = dependency(found)
    return drawn | markov.drawn(found)


def tasks(found: Comparison) -> bytes:
    """A heat map: methods by tasks, the best method first."""
    whole = found.figures["all tasks"]
    order = sorted(whole, key=lambda name: -(whole[name]["score"] or 0.0))
    names = list(found.tasks)
    by_label = {method.label: method for method in found.methods}
    cells = [[100 * (by_label[name].runs[task].figures["score"] or 0.0) for task in names] for name in order]
    figure = _figure(3.5 + 0.75 * len(names), 1.6 + 0.24 * len(order))
    axes = figure.subplots()
    image = axes.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_yticks(range(len(order)), order, fontsize=7)
    for row, line in enumerate(cells):
        for column, value in enumerate(line):
            color = "black" if value > 60 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, label="score, %")
    return _png(figure)


def dependency(found: Comparison) -> bytes:
    """Score against tokens per forward, for tasks of low and of high dependency; families of settings as lines."""
    figure = _figure(9, 5.5)
    axes, rates = figure.subplots(), []
    for level, color in (("low", LOW), ("high", HIGH)):
        figures = found.figures[f"{level} dependency"]

        def point(name: str, figures: dict[str, Any] = figures) -> tuple[float, float]:
            one = figures[name]
            return one["canvas_tokens_per_forward"], 100 * one["score"]

        named = list(figures)
        rates += [point(name)[0] for name in named]
        tasks = ", ".join(found.views[f"{level} dependency"])
        axes.scatter(*zip(*map(point, named), strict=True), s=14, color=color, alpha=0.45, label=f"{level}: {tasks}")
        styles = (f"{marker}{line}" for marker in ("", "s", "^", "D", "v") for line in ("-", "--", ":", "-."))
        for style, (family, methods) in zip(cycle(styles), found.families.items(), strict=False):
            line = sorted(point(method.label) for method in methods if method.label in figures)
            if len(line) > 1:
                shown = family if level == "high" else None
                axes.plot(*zip(*line, strict=True), style, color=color, linewidth=1.6, markersize=4, label=shown)
    _log(axes, rates)
    axes.set_xlabel(TITLES["canvas_tokens_per_forward"])
    axes.set_ylabel("score, %")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2)
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _log(axes: Axes, values: list[float]) -> None:
    if known := [value for value in values if value > 0]:
        scale_rates(axes, min(known) / 1.3, max(known) * 1.3)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
