"""The picture of `task=markov`: what each scheduler does to a known Markov chain, against forwards.

The model makes no error, so whatever the error is, the sampler made it (the question of arXiv 2602.19619).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from dllm_sampler.eval.report.data import Comparison, Run

TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def drawn(found: Comparison) -> dict[str, bytes]:
    """A picture of each chain that was sampled whole, by the word that its file name ends in."""
    tasks = [task for task in found.tasks if curves(found, task)]
    return {f"markov{number or ''}": draw(curves(found, task)) for number, task in enumerate(tasks)}


def curves(found: Comparison, task: str) -> dict[str, list[Run]]:
    """The runs of a task whose answers were compared with a chain, by the family of their configurations."""
    families: dict[str, list[Run]] = {}
    for method in found.methods:
        if task in method.runs and "transition_kl" in method.runs[task].together:
            families.setdefault(method.family, []).append(method.runs[task])
    return families


def draw(families: dict[str, list[Run]]) -> bytes:
    """A PNG file: KL of transitions and the gap in log-likelihood against forwards; exact samples' noise in grey."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(15, 7), dpi=110, layout="constrained")
    runs = [run for family in families.values() for run in family]
    most = max(_of(run, "nfe") for run in runs)
    styles = _styles(sorted(families))
    for axes, name in zip(figure.subplots(1, 2), ("transition_kl", "likelihood_gap"), strict=True):
        noise, gap = max(_of(run, f"{name}_floor") for run in runs), name == "likelihood_gap"
        for family, (color, marker) in styles.items():
            own = sorted((_of(run, "nfe"), _of(run, name)) for run in families[family])
            if not gap:  # exact samples lie around 0, below which a logarithm has no place
                own = [(forwards, max(kl, noise / 3)) for forwards, kl in own]
            axes.plot(*zip(*own, strict=True), marker=marker, color=color, linewidth=1, markersize=5, alpha=0.85)
        axes.set_xscale("log", base=2)
        ticks = [tick for tick in TICKS if tick <= 2 * most]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("forwards per sequence (mean)")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhspan(-noise if gap else 0, noise, color="0.5", alpha=0.25, linewidth=0)
        if gap:
            axes.set_ylabel("nats per token by which samples are less likely than the chain's own")
            axes.set_title("log-likelihood (below 0: too likely)", fontsize=10)
        else:
            axes.set_yscale("log")
            axes.set_ylim(bottom=noise / 4)
            axes.set_ylabel("KL of transitions from the chain's, nats per transition")
            axes.set_title("transitions (grey: exact samples of this number)", fontsize=10)
    handles = [
        Line2D([], [], color=color, marker=marker, linewidth=1, label=family)
        for family, (color, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _of(run: Run, name: str) -> float:
    value = run.figures[name]
    assert value is not None
    return value


def _styles(families: Sequence[str]) -> dict[str, tuple[Any, str]]:
    from matplotlib import colormaps

    colors, markers = colormaps["tab10"].colors, "osv^DPX*"  # pyright: ignore[reportAttributeAccessIssue]
    return {family: (colors[i % 10], markers[(i // 10 + i) % len(markers)]) for i, family in enumerate(families)}
