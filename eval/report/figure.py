"""The figure of a report, drawn to be printed: score against speed, each configuration with its interval.

Colour and fill show the scheduler, and the marker shows the cache. A line joins the settings of one method.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

from dllm_sampler.errors import UserError, installing
from dllm_sampler.eval.curves import front
from dllm_sampler.eval.report.data import Comparison, Figures, Method
from dllm_sampler.eval.report.published import points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

TITLES = {
    "answer_tokens_per_forward": "tokens per forward",
    "canvas_tokens_per_forward": "canvas tokens per forward (padding counts)",
    "tokens_per_second": "tokens per second",
}
COLUMN, PAGE, PANEL = 3.5, 7.0, 2.6  # inches: one column of a paper and both, and the height of a panel
DPI = 200
MANY = 15  # most schedulers in the legend of a narrow figure
# Okabe and Ito's colours, which colour-blind readers can tell apart, with Tol's wine in place of yellow and black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
FILLS: tuple[Any, ...] = ("full", "none", "left", "top", "right", "bottom")  # a second round of colours is open ...
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = "os^DvPXph<>"
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "pdf.fonttype": 42,  # TrueType: publishers refuse type 3
    "svg.hashsalt": "dllm-report",  # the same runs give the same file
}
RING = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 0.8}
STAR = {"marker": "*", "markersize": 8, "color": "black", "linestyle": "none"}
PUBLISHED = {
    "marker": "D", "markersize": 3.5, "markerfacecolor": "white", "markeredgecolor": "0.45", "linestyle": "none",
}  # fmt: skip
Entry = tuple[str, Any]  # of the legend: text and handle
CROWD = 40  # most points that all have a label; with more, only those of the front have one


@dataclass(frozen=True)
class Panel:
    """A part of the figure.

    title: the task, or "" for a panel of all tasks
    figures: the measures of each method, by its label
    rate: the measure of the horizontal axis
    oracle: rate and score (0 to 1) of the oracle on the answers of one token per step, or None
    published: rate, score in % and name of published figures
    """

    title: str
    figures: Mapping[str, Figures]
    rate: str
    oracle: tuple[float, float] | None
    published: Sequence[tuple[float, float, str]] = ()

    @property
    def points(self) -> dict[str, tuple[float, float]]:
        """Rate and score in % of each method that has both."""
        return {
            label: (rate, 100 * score)
            for label, one in self.figures.items()
            if (rate := one[self.rate]) and (score := one["score"]) is not None
        }

    @property
    def front(self) -> set[str]:
        """The labels of the methods on the Pareto front."""
        return front(self.points)


def require_matplotlib() -> None:
    """Raise `UserError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError("package-missing", f"Figures need matplotlib. Run {installing('eval')}.")


def draw(
    found: Comparison, form: str, rates: Sequence[str] = ("answer_tokens_per_forward",), published: bool = False
) -> bytes:
    """Draw score against rate for all methods, with a panel for each rate. Return the bytes of the file.

    Tasks share a panel if each method has run all of them. Otherwise, and for several tasks with `published`, each task
    has its own panels.

    `form` is `pdf`, `svg` or `png`. `published` adds published figures for the same model, task and lengths, if the
    runs follow a protocol (`suite=protocol/NAME`).
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = _figure(found, panels(found, rates, published))
        out = io.BytesIO()
        dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}
        figure.savefig(out, format=form, metadata=dates[form])
    return out.getvalue()


def panels(found: Comparison, rates: Sequence[str], published: bool = False) -> list[Panel]:
    """Return the panels of the figure, without rates that no method has. Published figures are of a single task."""
    whole = len(found.figures["all tasks"]) == len(found.methods) and not (published and len(found.tasks) > 1)
    views = {"": "all tasks"} if whole else {task: task for task in found.tasks}
    made = []
    for (title, view), rate in product(views.items(), rates):
        oracle = found.oracle(view) if rate == "answer_tokens_per_forward" else None
        tasks = found.views[view]
        others = points(found, tasks, rate) if published and len(tasks) == 1 else []
        panel = Panel(title, found.figures[view], rate, oracle, others)
        if panel.points:
            made.append(panel)
    return made


def _figure(found: Comparison, parts: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure

    looks = _looks(found)
    columns = min(len(parts), 2)
    rows = math.ceil(len(parts) / columns)
    entries = _schedulers(found, looks, parts), _others(found, looks, parts)
    width = COLUMN if columns == 1 and len(entries[0]) <= MANY else PAGE
    figure = Figure(figsize=(width, PANEL * rows), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, panel in zip(axes, parts, strict=False):
        _panel(place, found, panel, looks)
    for place in axes[len(parts) :]:
        place.remove()
    for place in figure.axes[::columns]:
        place.set_ylabel(_score(found, parts))
    figure.set_figheight(PANEL * rows + _legend(figure, *entries))
    figure.draw_without_rendering()  # the layout is settled: labels are placed by what their text measures
    for place, panel in zip(figure.axes, parts, strict=True):
        _label(place, found, panel, looks)
    return figure


# What is drawn --------------------------------------------------------------------------------------------------------


def _panel(axes: Axes, found: Comparison, panel: Panel, looks: Mapping[str, dict[str, Any]]) -> None:
    points, best = panel.points, panel.front
    edge = sorted(points[label] for label in best)
    axes.step(*zip(*edge, strict=True), where="pre", color="0.8", linewidth=3, solid_joinstyle="miter", zorder=1)
    for line in lines(found, points):
        style = looks[line[0].label]
        known = [points[method.label] for method in line]
        axes.plot(*zip(*known, strict=True), color=style["color"], linestyle=style["linestyle"], linewidth=0.9)
    for label, (rate, score) in points.items():
        one, style = panel.figures[label], looks[label]
        across = _interval(one, panel.rate, rate)
        upright = _interval(one, "score", score, 100)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.6, "alpha": 0.45}
        axes.errorbar([rate], [score], xerr=across, yerr=upright, **bars)
        axes.plot(rate, score, **_marker(style), zorder=4)
        if label in best:
            axes.plot(rate, score, **RING, zorder=5)
    if panel.oracle:
        axes.plot(panel.oracle[0], 100 * panel.oracle[1], **STAR, zorder=4)
    for rate, score, _ in panel.published:
        axes.plot(rate, score, **PUBLISHED, zorder=2)
    _scales(axes, panel)
    missing = len(panel.figures) - len(points)
    axes.set_xlabel(TITLES[panel.rate] + (f" (not measured: {missing})" if missing else ""))
    axes.set_title(panel.title)
    axes.grid(color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _interval(one: Figures, name: str, middle: float, factor: float = 1.0) -> list[list[float]] | None:
    """Return the two arms of an error bar, or None if the measure has no interval."""
    low, high = one.get(f"{name}_low"), one.get(f"{name}_high")
    if low is None or high is None:
        return None
    return [[max(0.0, middle - factor * low)], [max(0.0, factor * high - middle)]]


def lines(found: Comparison, points: Mapping[str, object]) -> list[list[Method]]:
    """Return groups of methods that differ only in the setting with the most values, in the order of these values."""
    groups: dict[str, list[Method]] = {}
    for method in found.methods:
        if method.label in points:
            groups.setdefault(method.family, []).append(method)
    made: dict[tuple[Any, ...], list[Method]] = {}
    for family, methods in groups.items():
        values: dict[str, set[float]] = {}
        for method in methods:
            for name, value in method.settings.items():
                values.setdefault(name, set()).add(value)
        swept = max(values, key=lambda name: len(values[name]), default=None)
        for method in methods:
            others = tuple((name, value) for name, value in method.settings.items() if name != swept)
            if swept in method.settings:
                made.setdefault((family, others, swept), []).append(method)
    ordered = [sorted(line, key=lambda method: method.settings[key[-1]]) for key, line in made.items()]
    return [line for line in ordered if len(line) > 1]


def _looks(found: Comparison) -> dict[str, dict[str, Any]]:
    schedulers = list(dict.fromkeys(method.scheduler for method in found.methods))
    caches = list(dict.fromkeys(method.cache for method in found.methods))
    looks = {}
    for method in found.methods:
        turn, color = divmod(schedulers.index(method.scheduler), len(COLORS))
        looks[method.label] = {
            "color": COLORS[color],
            "fillstyle": FILLS[turn % len(FILLS)],
            "linestyle": LINES[turn % len(LINES)],
            "marker": MARKERS[caches.index(method.cache) % len(MARKERS)],
        }
    return looks


def _marker(style: Mapping[str, Any]) -> dict[str, Any]:
    shape = {"marker": style["marker"], "fillstyle": style["fillstyle"], "markersize": 4.5, "markeredgewidth": 0.8}
    return shape | {"color": style["color"], "linestyle": "none", "markerfacecoloralt": "white"}


# Axes -----------------------------------------------------------------------------------------------------------------


def _scales(axes: Axes, panel: Panel) -> None:
    """Set scales and three to five ticks, so that all points and their intervals are inside."""
    ends = [*panel.points.values(), *([(panel.oracle[0], 100 * panel.oracle[1])] if panel.oracle else [])]
    rates, scores = [rate for rate, _ in ends], [score for _, score in ends]
    for one, arm in product((panel.figures[label] for label in panel.points), ("low", "high")):
        if value := one.get(f"{panel.rate}_{arm}"):
            rates.append(value)
        if (value := one.get(f"score_{arm}")) is not None:
            scores.append(100 * value)
    rates += [rate for rate, *_ in panel.published]
    scores += [score for _, score, _ in panel.published]
    low, high = min(rates), max(rates)
    room = max(1.08, (high / low) ** 0.06, math.sqrt(1.6 * low / high))
    scale_rates(axes, low / room, high * room)
    low, high = min(scores), max(scores)
    room = max(0.05 * (high - low), 2.5 - (high - low) / 2)
    axes.set_ylim(low - room, high + room)
    axes.set_yticks([tick for tick in even_ticks(low - room, high + room) if tick <= 100])


def scale_rates(axes: Axes, low: float, high: float) -> None:
    """Make the horizontal axis logarithmic, with these limits and three to five ticks."""
    chosen = ticks(low, high)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(chosen, [f"{tick:g}" for tick in chosen])
    axes.set_xticks([], minor=True)


def ticks(low: float, high: float) -> list[float]:
    """Return three to five round numbers from `low` to `high` for a logarithmic axis, as evenly spread as they come."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    twos = [[2.0**power for power in powers if power % step == 0] for step in (1, 2, 3, 4)]
    tens = [[float(f"{digit}e{decade}") for decade in decades for digit in digits] for digits in ((1,), (1, 2, 5))]
    for candidates in tens + twos if high > 64 else twos + tens:
        inside = [tick for tick in candidates if low <= tick <= high]
        if 3 <= len(inside) <= 5:
            return inside
    return even_ticks(low, high)


def even_ticks(low: float, high: float) -> list[float]:
    """Return three to five round numbers from `low` to `high` at equal distances."""
    from matplotlib.ticker import MaxNLocator

    for count in (4, 5, 6, 7, 8):
        places = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        inside = [float(f"{tick:.12g}") for tick in places if low <= tick <= high]
        if len(inside) >= 3:
            break
    return inside[:5]


def _score(found: Comparison, parts: Sequence[Panel]) -> str:
    """Return the title of the vertical axis."""
    names = {run.about["score"] for method in found.methods for run in method.runs.values()}
    name = names.pop().replace("_", " ") if len(names) == 1 else "score"
    several = len(found.tasks) > 1 and not parts[0].title
    return f"{name} (%)" + (f", mean of {len(found.tasks)} tasks" if several else "")


# Legend and labels ----------------------------------------------------------------------------------------------------


def _swept(found: Comparison) -> dict[str, list[str]]:
    """Return the settings that vary within each scheduler."""
    values: dict[str, dict[str, set[float | None]]] = {}
    for method in found.methods:
        values.setdefault(method.scheduler, {}).update({name: set() for name in method.settings})
    for method in found.methods:
        for name, known in values[method.scheduler].items():
            known.add(method.settings.get(name))
    return {one: [name for name, known in each.items() if len(known) > 1] for one, each in values.items()}


def _handle(**style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _schedulers(found: Comparison, looks: Mapping[str, Mapping[str, Any]], parts: Sequence[Panel]) -> list[Entry]:
    """Return the legend's entries of schedulers, with the settings that are written next to the points."""
    joined = {method.label for part in parts for line in lines(found, part.points) for method in line}
    made: list[Entry] = []
    for name, swept in _swept(found).items():
        methods = [method for method in found.methods if method.scheduler == name]
        style = {**_marker(looks[methods[0].label]), "marker": "o"}
        if any(method.label in joined for method in methods):
            style |= {"linestyle": looks[methods[0].label]["linestyle"], "linewidth": 0.9}
        told = ", ".join(swept)
        made.append((f"{name} ({told})" if told and told != name else name, _handle(**style)))
    return made


def _others(found: Comparison, looks: Mapping[str, Mapping[str, Any]], parts: Sequence[Panel]) -> list[Entry]:
    """Return the legend's other entries: caches if there are several, the front, published figures, the oracle."""
    made: list[Entry] = []
    by_cache: dict[str, Method] = {}
    for method in found.methods:
        by_cache.setdefault(method.cache, method)
    if len(by_cache) > 1:
        for name, method in by_cache.items():
            plain = {"color": "0.4", "fillstyle": "full", "marker": looks[method.label]["marker"]}
            made.append((f"cache: {name}", _handle(**_marker(plain))))
    band = {"color": "0.8", "linewidth": 3}
    made.append(("Pareto front", _handle(**band, **RING)))
    if any(part.published for part in parts):
        made.append(("published", _handle(**PUBLISHED)))
    if any(part.oracle for part in parts):
        made.append(("oracle of one per step", _handle(**STAR)))
    return made


def _legend(figure: Figure, *parts: list[Entry]) -> float:
    """Put the legend below the panels, each part in its own rows, and return its height in inches."""
    made = None
    for across in (6, 5, 4, 3, 2, 1):
        filled = [one for part in parts for one in part + [("", _handle(linestyle="none"))] * (-len(part) % across)]
        # A legend fills its columns one after the other.
        entries = [filled[place] for column in range(across) for place in range(column, len(filled), across)]
        if made is not None:
            made.remove()
        made = figure.legend(
            [handle for _, handle in entries],
            [text for text, _ in entries],
            loc="outside lower center",
            ncols=across,
            frameon=False,
            fontsize=7,
            handlelength=2.2,
            columnspacing=1.2,
            labelspacing=0.3,
        )
        if made.get_window_extent().width <= figure.bbox.width:
            break
    assert made is not None
    return made.get_window_extent().height / figure.dpi


def _label(axes: Axes, found: Comparison, panel: Panel, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the settings next to the points where there is room, those of the front first."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    points, best, dpi, swept = panel.points, panel.front, axes.figure.dpi, _swept(found)
    named = len({method.scheduler for method in found.methods}) > len(COLORS)
    pixels = {label: axes.transData.transform(point) for label, point in points.items()}
    if panel.oracle:
        pixels[""] = axes.transData.transform((panel.oracle[0], 100 * panel.oracle[1]))
    size = 4 / 72 * dpi
    taken = [Bbox.from_extents(x - size, y - size, x + size, y + size) for x, y in pixels.values()]
    frame = axes.get_window_extent()
    chosen = [method for method in found.methods if method.label in points]
    if len(chosen) > CROWD:
        chosen = [method for method in chosen if method.label in best]
    here: dict[tuple[bool, int, int], list[Method]] = {}  # points at the same place share a label
    for method in sorted(chosen, key=lambda method: (method.label not in best, -points[method.label][1])):
        x, y = pixels[method.label]
        here.setdefault((method.label in best, round(x / 3), round(y / 3)), []).append(method)

    def free_box(x: float, y: float, width: float, height: float, reach: float) -> Bbox | None:
        """Return the nearest free box of this size around a point inside the frame, or None if there is none."""
        radius = least = 5 / 72 * dpi
        while radius <= reach:
            for turn in (2, 22, 10, 14, 6, 18, 0, 12, 4, 20, 8, 16):  # to the right and above first, of 24
                right, up = radius * math.cos(math.pi * turn / 12), radius * math.sin(math.pi * turn / 12)
                left = x + right - (width if right < -1e-6 else width / 2 if abs(right) < 1e-6 else 0)
                low = y + up - (height if up < -1e-6 else height / 2 if abs(up) < 1e-6 else 0)
                box = Bbox.from_bounds(left, low, width, height)
                inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
                if inside and not any(box.overlaps(other) for other in taken):
                    return box
            radius += least / 2
        return None

    def write(text: str, point: tuple[float, float], reach: float, **style: Any) -> Annotation | None:
        """Write a text next to a point if there is room within `reach` typographic points. Else return None."""
        note = axes.annotate(text, point, xytext=(0, 0), textcoords="offset points", **style)
        note.set_in_layout(False)
        (x, y), own = axes.transData.transform(point), note.get_window_extent()
        box = free_box(x, y, own.width + 2, own.height + 1, reach / 72 * dpi)
        if box is None:
            note.remove()
            return None
        taken.append(box)
        note.set_position(((box.x0 + 1 - x) * 72 / dpi, (box.y0 + 1 - y) * 72 / dpi))
        return note

    for (important, *_), methods in here.items():
        texts = dict.fromkeys(filter(None, (_text(one, swept, important and named) for one in methods)))
        text = ", ".join(list(texts)[:3]) + (f" +{len(texts) - 3}" if len(texts) > 3 else "")
        point, colors = points[methods[0].label], {looks[one.label]["color"] for one in methods}
        color = colors.pop() if len(colors) == 1 else "black"
        outline = [withStroke(linewidth=1.5, foreground="white")]
        style = {"fontsize": 6 + 0.5 * important, "color": color, "path_effects": outline}
        note = write(text, point, 40 if important else 9, **style) if text else None
        if note is None:
            continue
        own, (x, y) = note.get_window_extent(), axes.transData.transform(point)
        right, up = (own.x0 + own.x1) / 2 - x, (own.y0 + own.y1) / 2 - y  # of the point
        if math.hypot(right, up) > own.width / 2 + 12 / 72 * dpi:
            arrow = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
            at = right * 72 / dpi, up * 72 / dpi
            line = axes.annotate("", point, xytext=at, textcoords="offset points", arrowprops=arrow, zorder=3)
            line.set_in_layout(False)
    for rate, score, name in panel.published:
        write(name, (rate, score), 9, fontsize=4.5, color="0.45")


def _text(method: Method, swept: Mapping[str, Sequence[str]], named: bool) -> str:
    """Return the values of the settings of a point, after the scheduler's name if it is `named`."""
    known = [f"{method.settings[name]:g}" for name in swept[method.scheduler] if name in method.settings]
    return " ".join([method.scheduler] * named + [", ".join(known)] * bool(known))
