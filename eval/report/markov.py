"""The picture of `task=markov`: the error of each scheduler on a known Markov chain, against forwards.

The model makes no error, so all of it is the sampler's (the question of arXiv 2602.19619).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dllm_sampler.eval.report.data import Comparison, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN = 8  # families in colour: more colours look alike
MARKERS = "osv^DPX*"
TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def drawn(found: Comparison) -> dict[str, bytes]:
    """Draw each chain whose runs are complete. Return PNG files by the word that their names end in."""
    tasks = [task for task in found.tasks if curves(found, task)]
    return {f"markov{number or ''}": draw(curves(found, task)) for number, task in enumerate(tasks)}


def curves(found: Comparison, task: str) -> dict[str, list[Run]]:
    """Return the runs of a task whose answers were compared with a chain, by the family of their configurations."""
    families: dict[str, list[Run]] = {}
    for method in found.methods:
        if task in method.runs and "transition_kl" in method.runs[task].together:
            families.setdefault(method.family, []).append(method.runs[task])
    return families


def draw(families: dict[str, list[Run]]) -> bytes:
    """Draw a PNG file: KL of transitions above, the gap in log-likelihood below, both against forwards.

    A column shows up to `COLUMN` families in colours of their own, over the others in grey: more colours
    cannot be told apart. The families are in the order of the KL at their slowest setting.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    order = sorted(families, key=lambda family: (_kl(families[family]), family))
    columns = [order[first : first + COLUMN] for first in range(0, len(order), COLUMN)]
    figure = Figure(figsize=(1 + 4.2 * len(columns), 10.5), dpi=100, layout="constrained")
    panels = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    colors: Any = colormaps["tab10"]
    for column, shown in enumerate(columns):
        for axes, name in zip(panels[:, column], ("transition_kl", "likelihood_gap"), strict=True):
            for family in (one for one in order if one not in shown):
                axes.plot(*_line(families, family, name), color="0.85", linewidth=0.8, marker=".", markersize=3)
            for number, family in enumerate(shown):
                error = _kl(families[family])
                told = f"{error:.2g}" if error > _noise(families, "transition_kl") else "none"
                label = f"{family} ({told} at {_slowest(families[family]):.0f})"
                style = {"color": colors(number), "marker": MARKERS[number], "label": label}
                axes.plot(*_line(families, family, name), **style, linewidth=1.2, markersize=6, alpha=0.85, zorder=3)
            _frame(axes, families, name)
        panels[0, column].set_title(f"{COLUMN * column + 1} to {COLUMN * column + len(shown)} of {len(order)}")
        handles, labels = panels[0, column].get_legend_handles_labels()
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.13), "frameon": False, "fontsize": 9}
        panels[1, column].legend(
            handles, labels, **below, title="KL at the forwards of the slowest setting\n(none: in the grey band)"
        )
        panels[1, column].set_xlabel("forwards per sequence (mean)")
    panels[0, 0].set_ylabel("KL of transitions from the chain's,\nnats per transition (lower is better)")
    panels[1, 0].set_ylabel("nats per token by which samples are less likely\nthan the chain's own (0 is right)")
    figure.suptitle("Coloured: the schedulers named below. Light grey: all others. Grey band: what exact samples show.")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _line(families: dict[str, list[Run]], family: str, name: str) -> tuple[list[float], list[float]]:
    """Return forwards and errors of a family's runs, the fastest first."""
    found = sorted((_of(run, "nfe"), _of(run, name)) for run in families[family])
    if name == "transition_kl":  # exact samples are near 0, which a logarithmic axis cannot show
        found = [(forwards, max(kl, _noise(families, name) / 3)) for forwards, kl in found]
    return [forwards for forwards, _ in found], [error for _, error in found]


def _frame(axes: Axes, families: dict[str, list[Run]], name: str) -> None:
    """Draw scales, ticks, and the band of exact samples."""
    noise, gap = _noise(families, name), name == "likelihood_gap"
    axes.set_xscale("log", base=2)
    ticks = [tick for tick in TICKS if tick <= 2 * max(_slowest(runs) for runs in families.values())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhspan(-noise if gap else 0, noise, color="0.5", alpha=0.25, linewidth=0)
    if not gap:
        axes.set_yscale("log")
        axes.set_ylim(bottom=noise / 4)


def _noise(families: dict[str, list[Run]], name: str) -> float:
    return max(_of(run, f"{name}_floor") for runs in families.values() for run in runs)


def _slowest(runs: Sequence[Run]) -> float:
    return max(_of(run, "nfe") for run in runs)


def _kl(runs: Sequence[Run]) -> float:
    """Return the KL of the run with the most forwards."""
    return _of(max(runs, key=lambda run: _of(run, "nfe")), "transition_kl")


def _of(run: Run, name: str) -> float:
    value = run.figures[name]
    assert value is not None
    return value
