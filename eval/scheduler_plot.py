"""The picture of docs/schedulers.md: exact match against tokens per forward, one labelled point per method."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from math import cos, pi, sin
from typing import TYPE_CHECKING, Protocol

from dllm_sampler.errors import UserError, installing
from dllm_sampler.eval.scheduler_runs import ORACLE, Row, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

PLAIN, BEST, BOUND = "#5b7083", "#c2410c", "#15803d"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)


def available() -> None:
    """Refuse to begin a run whose picture cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UserError(f"the picture needs matplotlib: {installing('eval')}")


def draw(rows: Sequence[Row]) -> bytes:
    """A PNG file: all methods, and where several crowd near the oracle, that corner enlarged next to them."""
    from matplotlib.figure import Figure

    figure, best, near = Figure(figsize=(15, 7.5), dpi=120, layout="constrained"), front(rows), crowd(rows)
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


def crowd(rows: Sequence[Row]) -> list[Row]:
    """The methods that come near the oracle: at least half its tokens per forward, at most 10 points less exact."""
    oracle = next((row for row in rows if row.method == ORACLE), None)
    if oracle is None:
        return []
    rate, exact = oracle.point
    found = [row for row in rows if row is not oracle and row.point[0] >= rate / 2 and row.point[1] >= exact - 10]
    return found if len({row.point for row in found}) > 3 else []


def _points(axes: Axes, rows: Sequence[Row], best: set[str]) -> None:
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


class Labelled(Protocol):
    """What a picture shows as a point with a name."""

    @property
    def method(self) -> str:
        """The name."""
        ...

    @property
    def point(self) -> tuple[float, float]:
        """Where it lies."""
        ...


def label(axes: Axes, rows: Sequence[Labelled], best: set[str], shown: Sequence[Labelled]) -> None:
    """Put the label of each row at the nearest free place around its point, off all points that are `shown`."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    points = [axes.transData.transform(row.point) for row in rows]
    others = [axes.transData.transform(row.point) for row in shown]
    taken = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in others]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for row, (x, y) in sorted(zip(rows, points, strict=True), key=lambda pair: (-pair[0].point[1], pair[0].point[0])):
        color = BOUND if row.method == ORACLE else BEST if row.method in best else PLAIN
        text = axes.annotate(
            row.method,
            row.point,
            xytext=(0, 0),
            textcoords="offset pixels",
            fontsize=8,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2},
        )
        text.set_in_layout(False)  # the layout is settled: places are measured in it
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        size = text.get_window_extent()
        box = _place(x, y, size.width + 4, size.height + 2, axes.get_window_extent(), taken)
        taken.append(box)
        text.set_position((box.x0 + 2 - x, box.y0 + 2 - y))


def _place(x: float, y: float, width: float, height: float, frame: Bbox, taken: Sequence[Bbox]) -> Bbox:
    """The nearest box of this size around a point that lies in the frame and on nothing that is there."""
    from matplotlib.transforms import Bbox

    box = Bbox.from_bounds(x, y, width, height)  # if there is no room anywhere
    for radius, turn in product(range(12, 700, 4), range(24)):
        right, up = radius * cos(pi * turn / 12), radius * sin(pi * turn / 12)
        box = Bbox.from_bounds(x + right - (width if right < 0 else 0), y + up - height / 2, width, height)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if inside and not any(box.overlaps(other) for other in taken):
            break
    return box
