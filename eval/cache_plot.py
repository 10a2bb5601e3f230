"""The picture of docs/caches.md: agreement on one model against time on another, one labelled point per cache."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_sampler.eval.cache_runs import Row
from dllm_sampler.eval.scheduler_plot import BEST, PLAIN, label


@dataclass(frozen=True)
class Point:
    """A cache's time per step over that without a cache, and its tokens as `none` in %."""

    method: str
    point: tuple[float, float]


def draw(timed: Sequence[Row], judged: Sequence[Row], where: str, what: str) -> bytes:
    """A PNG file: time from the rows `timed` on the model `where`, agreement from those `judged` on `what`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    axes, agreement = figure.subplots(), {row.cache: row.agreement for row in judged}
    kept = [row for row in timed if row.cache != "none random_order"]
    points = [Point(row.cache, (row.ratio, agreement[row.cache])) for row in kept]
    best = {one.method for one in points if not any(_beats(other, one) for other in points)}
    for one in points:
        axes.plot(*one.point, "o", color=BEST if one.method in best else PLAIN, markersize=5)
    axes.plot([], [], "o", color=BEST, markersize=5, label="no other cache is as fast and agrees as much")
    axes.plot([], [], "o", color=PLAIN, markersize=5, label="another one is at least as good in both")
    axes.set_xlabel(f"← faster     time per step on {where}, no cache = 1 (lower is better)")
    axes.set_ylabel(f"tokens as without a cache on {what}, % (higher is better)")
    axes.legend(loc="lower right", frameon=False, title="the best corner is at the top left")
    axes.margins(0.15)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # labels are placed by what their text measures
    label(axes, points, best, points)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _beats(one: Point, other: Point) -> bool:
    """Whether it is as fast and as true, and better in one."""
    (fast, true), (its, own) = one.point, other.point
    return one.point != other.point and fast <= its and true >= own
