"""Labelled points of a picture: each name at the nearest free place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import cos, pi, sin
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

ORACLE = "oracle"
PLAIN, BEST, BOUND = "#5b7083", "#c2410c", "#15803d"


@dataclass(frozen=True)
class Point:
    """A point with a name."""

    method: str
    point: tuple[float, float]


def label(axes: Axes, points: Sequence[Point], best: set[str], shown: Sequence[Point]) -> None:
    """Put each name at the nearest free place around its point, off all points that are `shown`."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    pixels = [axes.transData.transform(one.point) for one in points]
    others = [axes.transData.transform(one.point) for one in shown]
    taken = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in others]
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for one, (x, y) in sorted(zip(points, pixels, strict=True), key=lambda pair: (-pair[0].point[1], pair[0].point[0])):
        color = BOUND if one.method == ORACLE else BEST if one.method in best else PLAIN
        text = axes.annotate(
            one.method,
            one.point,
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
