"""The report's pictures as PNG files: the Pareto front, and the cost of dependency between tokens."""

import io
from itertools import cycle
from typing import Any

from dllm_sampler.eval.report import markov
from dllm_sampler.eval.report.data import Comparison
from dllm_sampler.eval.report.figure import TITLES, draw, require_matplotlib, scale_rates

LOW, HIGH = "#2563eb", "#c2410c"


def pictures(found: Comparison, published: bool = False) -> dict[str, bytes]:
    """Draw every picture that the runs allow. Return each as a PNG file, by its name, for example `front`."""
    require_matplotlib()
    drawn = {}
    if found.methods:
        drawn["front"] = draw(found, "png", ("answer_tokens_per_forward", "tokens_per_second"), published)
    if all(found.figures.get(f"{level} dependency") for level in ("low", "high")):
        drawn["dependency"] = dependency(found)
    return drawn | markov.drawn(found)


def dependency(found: Comparison) -> bytes:
    """Draw a PNG file: score against canvas tokens per forward, for tasks of low and of high dependency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
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
    if known := [rate for rate in rates if rate > 0]:
        scale_rates(axes, min(known) / 1.3, max(known) * 1.3)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(TITLES["canvas_tokens_per_forward"])
    axes.set_ylabel("score, %")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
