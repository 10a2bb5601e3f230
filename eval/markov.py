"""What each scheduler does to a Markov chain whose posteriors the model knows exactly: error against forwards.

`python -m dllm_sampler.eval.markov --output markov [--rows 500] [--length 32] [--states 8] [--only threshold factor]`

Writes `<output>.png` and `<output>.json`. Tokens are drawn at temperature 1, in one block without cache. Whatever the
error is, the sampler made it (the question of arXiv 2602.19619).
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from dllm_sampler import config
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval import scheduler_plot
from dllm_sampler.eval.arguments import Parser, positive
from dllm_sampler.eval.markdown import write
from dllm_sampler.eval.testbeds.chain import Distance, MarkovChain
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.sampler import Sampler

STEPS = (1, 2, 4, 8, 16, 32, 64)
# The field that makes a scheduler bolder, and how bold; others run at their defaults.
KNOBS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fixed": ("steps", STEPS),
    "random_order": ("steps", STEPS),
    "origin": ("steps", STEPS),
    "certainty": ("steps", STEPS),
    "klass": ("threshold", (0.9, 0.7, 0.5, 0.3)),
    "leftright": ("tokens_per_step", (1, 2, 4, 8, 16, 32)),
    "threshold": ("threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
    "dinfer": ("threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
    "localleap": ("threshold", (0.95, 0.8, 0.6)),
    "slowfast": ("threshold", (0.95, 0.8, 0.6, 0.4)),
    "credit": ("threshold", (0.95, 0.8, 0.6, 0.4)),
    "wino": ("threshold", (0.8, 0.6, 0.4)),
    "factor": ("factor", (0.3, 0.7, 1.0, 1.5, 2.5)),
    "entropy": ("entropy", (0.1, 0.3, 0.6, 1.0, 1.5)),
    "entropy_bound": ("gamma", (0.03, 0.1, 0.3, 1.0, 3.0)),
}
# What is chosen by another score than the confidence of the token drawn does not look at the draw.
BLIND = (("fixed", "score", ("random", "entropy")),)


@dataclass(frozen=True)
class Point:
    """One scheduler at one setting."""

    scheduler: str
    settings: dict[str, Any]
    nfe: float  # mean forwards per sequence
    distance: Distance

    @property
    def label(self) -> str:
        """The family of its curve."""
        score = self.settings.get("score")
        return f"{self.scheduler} by {score}" if score else self.scheduler


def plans(length: int, only: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every scheduler at every boldness."""
    for name in config.names("scheduler"):
        if only and name not in only:
            continue
        field, values = KNOBS.get(name, ("", ()))
        values = [value for value in values if not isinstance(value, int) or value <= length] or [None]
        for value in values:
            given = {} if value is None else {field: value}
            yield name, given
            for family, extra, choices in BLIND:
                if family == name:
                    yield from ((name, {**given, extra: choice}) for choice in choices)


def measure(chain: MarkovChain, name: str, settings: dict[str, Any], rows: int, seed: int = 0) -> Point:
    """Sample `rows` sequences and compare them with the chain.

    Raises:
        UserError: the scheduler cannot work with a test bed, or not without what it lacks here.
    """
    start, _ = chain.sample(rows, seed)
    sampler = Sampler(
        LawDenoiser(chain),
        scheduler={"name": name, **settings},
        blocks="full",
        stop="none",
        cache="none",
        temperature=1.0,
    )
    prompts = [[one] for one in start.tolist()]
    result = sampler.generate(prompts, max_new_tokens=chain.length, seed=seed * rows)
    distance = chain.distance(result.tokens, start, seed=seed + 1)
    return Point(name, settings, float(result.nfe.double().mean()), distance)


def run(
    chain: MarkovChain, rows: int, seed: int, only: Sequence[str] | None = None, console: Console | None = None
) -> tuple[list[Point], dict[str, str]]:
    """All points, and why the schedulers that are not among them cannot run."""
    points, refused = [], {}
    work = list(plans(chain.length, only))
    with Progress(console=console or Console(stderr=True), transient=True) as progress:
        shown = progress.add_task("", total=len(work))
        for name, settings in work:
            progress.update(shown, advance=1, description=name)
            try:
                points.append(measure(chain, name, settings, rows, seed))
            except UserError as error:
                refused[name] = str(error)
    return points, refused


def draw(points: Sequence[Point]) -> bytes:
    """A PNG file: KL of transitions and the gap in log-likelihood against forwards; exact samples' noise in grey."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(15, 7), dpi=110, layout="constrained")
    kl, gap = figure.subplots(1, 2)
    floor = points[0].distance
    families = sorted({point.label for point in points})
    styles = _styles(families)
    for axes, value, noise in (
        (kl, lambda point: max(point.distance.kl, floor.kl_floor / 3), floor.kl_floor),
        (gap, lambda point: point.distance.gap, floor.gap_floor),
    ):
        for family in families:
            own = sorted((point.nfe, value(point)) for point in points if point.label == family)
            color, marker = styles[family]
            axes.plot(*zip(*own, strict=True), marker=marker, color=color, linewidth=1, markersize=5, alpha=0.85)
        axes.set_xscale("log", base=2)
        ticks = [tick for tick in STEPS if tick <= 2 * max(point.nfe for point in points)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("forwards per sequence (mean)")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhspan(-noise if axes is gap else 0, noise, color="0.5", alpha=0.25, linewidth=0)
    kl.set_yscale("log")
    kl.set_ylim(bottom=floor.kl_floor / 4)
    kl.set_ylabel("KL of transitions from the chain's, nats per transition")
    kl.set_title("transitions (grey: exact samples of this number)", fontsize=10)
    gap.set_ylabel("nats per token by which samples are less likely than the chain's own")
    gap.set_title("log-likelihood (below 0: too likely)", fontsize=10)
    handles = [
        Line2D([], [], color=styles[family][0], marker=styles[family][1], linewidth=1, label=family)
        for family in families
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _styles(families: Sequence[str]) -> dict[str, tuple[Any, str]]:
    from matplotlib import colormaps

    colors, markers = colormaps["tab10"].colors, "osv^DPX*"  # pyright: ignore[reportAttributeAccessIssue]
    return {family: (colors[i % 10], markers[(i // 10 + i) % len(markers)]) for i, family in enumerate(families)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; 2 after a mistake in the arguments."""
    parser = Parser(
        prog="python -m dllm_sampler.eval.markov", description="Measure what schedulers do to a known Markov chain."
    )
    parser.add_argument("--output", type=Path, required=True, help="path of the .png and .json, without ending")
    parser.add_argument("--rows", type=positive, default=500, help="sequences per point")
    parser.add_argument("--length", type=positive, default=32, help="tokens of a sequence")
    parser.add_argument("--states", type=positive, default=8)
    parser.add_argument("--concentration", type=float, default=0.3, help="of the rows' Dirichlet law; small: peaked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="schedulers")
    try:
        options: Any = parser.parse_args(arguments)
        scheduler_plot.available()
        if options.states < 2 or not 0 < options.concentration < inf:
            raise UserError("--states must be at least 2 and --concentration a number above 0")
        for name in options.only or ():
            if name not in config.names("scheduler"):
                raise unknown("scheduler", name, config.names("scheduler"))
        folder = options.output.parent
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder} to write to")
        torch.set_num_threads(1)
        chain = MarkovChain.drawn(options.states, options.length, options.concentration, options.seed)
        points, refused = run(chain, options.rows, options.seed, options.only)
        about = {key: value for key, value in vars(options).items() if key != "output"}
        found = [{**asdict(point), "label": point.label} for point in points]
        data = {"setup": about, "entropy_rate": chain.entropy_rate, "points": found, "refused": refused}
        write(options.output.with_suffix(".json"), json.dumps(data, indent=1))
        if points:
            write(options.output.with_suffix(".png"), draw(points))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for point in sorted(points, key=lambda point: (point.label, point.nfe)):
        d = point.distance
        told = ", ".join(f"{key}={value}" for key, value in point.settings.items() if key != "score")
        print(
            f"{point.label:24} {told:22} forwards {point.nfe:6.2f}  KL {d.kl:8.5f} ± {d.kl_floor:.5f}"
            f"  TV {d.tv:.4f} ({d.tv_floor:.4f})  gap {d.gap:+.4f} ± {d.gap_floor:.4f}"
        )
    for name, why in refused.items():
        print(f"{name}: not measured, {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
