"""The picture of docs/sliding.md: an answer of `mini`, forward by forward, in blocks and in windows that slide.

`python -m tests.tables.sliding [--output FILE]`
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Denoiser, Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.eval.report.figure import require_matplotlib
from dllm_sampler.host import files
from dllm_sampler.sampler import Sampler

COMMAND = "python -m tests.tables.sliding"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "sliding.png"
PROMPT, TOKENS = "sort: Carl, Harry, Vera, Clara, Karl, Nathan, Bob, David", 24
SLIDING: dict[str, Any] = {"name": "sliding", "masks": 6}
PANELS: dict[str, dict[str, Any]] = {
    "blocks=fixed blocks.length=6": {"blocks": {"name": "fixed", "length": 6}},
    "blocks=sliding blocks.masks=6": {"blocks": SLIDING},
    "the same with cache=sliding cache.before=3 cache.every=9": {
        "blocks": SLIDING,
        "cache": {"name": "sliding", "before": 3, "every": 9},
    },
}
NOW, BEFORE, WINDOW, LATER = "#f59e0b", "#d4d4d8", "#bfdbfe", "#ffffff"


@dataclass(frozen=True)
class Forward:
    """One forward of one answer, by columns of the answer."""

    window: tuple[int, int]
    masks: list[bool]  # before the forward
    computed: list[bool]


@dataclass(frozen=True)
class Spy:
    """A denoiser that takes down the window and the columns of each forward."""

    inner: Denoiser
    forwards: list[Forward]

    @property
    def spec(self) -> ModelSpec:
        """See `Denoiser`."""
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """See `Denoiser`."""
        first = int(canvas.layout.first)
        window = int(canvas.start) - first, int(canvas.stop) - first
        sets = (one[0, first:-1].tolist() for one in (canvas.masked, plan.wanted.computed))
        self.forwards.append(Forward(window, *sets))
        return self.inner(canvas, query, plan)

    def head(self, hidden: Tensor) -> Tensor:
        """See `Denoiser`."""
        return self.inner.head(hidden)


def decode(base: Sampler, plugins: dict[str, Any]) -> tuple[list[Forward], list[str]]:
    """Return the forwards of an answer, and its tokens as text."""
    spy = Spy(base.denoiser, [])
    sampler = Sampler(spy, tokenizer=base.tokenizer, scheduler="threshold", stop="none", **plugins)
    result = sampler.generate([PROMPT], max_new_tokens=TOKENS)
    assert base.tokenizer is not None
    words = [str(base.tokenizer.decode([token])).strip() for token in result.trace.decoded[0].tolist()]
    return spy.forwards, words


def draw(base: Sampler) -> bytes:
    """Return the picture, a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    runs = {title: decode(base, plugins) for title, plugins in PANELS.items()}
    heights = [len(forwards) for forwards, _ in runs.values()]
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    panels = figure.subplots(len(runs), 1, gridspec_kw={"height_ratios": heights})
    for axes, (title, (forwards, words)) in zip(panels, runs.items(), strict=True):
        after = [one.masks for one in forwards[1:]] + [[False] * TOKENS]
        for line, (forward, left) in enumerate(zip(forwards, after, strict=True)):
            start, stop = forward.window
            for column, masked in enumerate(forward.masks):
                color = BEFORE if not masked else WINDOW if start <= column < stop else LATER
                color = NOW if masked and not left[column] else color
                hatch = None if forward.computed[column] else "////"
                axes.add_patch(
                    Rectangle((column, line), 1, 1, facecolor=color, edgecolor="#a1a1aa", lw=0.4, hatch=hatch)
                )
                if not left[column]:
                    place = {"ha": "center", "va": "center", "fontsize": 6}
                    axes.text(column + 0.5, line + 0.5, words[column], color="black" if masked else "#71717a", **place)
            axes.add_patch(Rectangle((start, line), stop - start, 1, fill=False, edgecolor="#1d4ed8", lw=1.8))
        axes.set(xlim=(-0.1, TOKENS + 0.1), ylim=(len(forwards) + 0.1, -0.1), title=title, ylabel="forward")
        axes.set_yticks([line + 0.5 for line in range(len(forwards))], range(1, len(forwards) + 1))
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    handles = [
        Patch(facecolor=NOW, edgecolor="#a1a1aa", label="committed by this forward"),
        Patch(facecolor=BEFORE, edgecolor="#a1a1aa", label="committed before"),
        Patch(facecolor=WINDOW, edgecolor="#a1a1aa", label="mask that may be committed"),
        Patch(facecolor=LATER, edgecolor="#a1a1aa", label="mask after the window"),
        Patch(facecolor=LATER, edgecolor="#a1a1aa", hatch="////", label="served from the cache"),
        Patch(fill=False, edgecolor="#1d4ed8", lw=1.8, label="block or window"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture and return the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Draw the picture of docs/sliding.md.")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help="picture to write")
    output = parser.parse_args(arguments).output
    require_matplotlib()
    torch.set_num_threads(1)
    files.write(output, draw(Sampler.from_pretrained("mini", device="cpu")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
