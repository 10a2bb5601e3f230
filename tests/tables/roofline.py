"""The table and the picture of docs/roofline.md: how fast a forward can be at best, by model and GPU.

    python -m tests.tables.roofline                                          # floors of the shipped models and GPUs
    python -m tests.tables.roofline --models llada-8b --gpus h200 --parts    # which part is bound by what
    python -m tests.tables.roofline --gpus h200 --bandwidth 4.5 --copy 4.3 --peak 790   # measured, TB/s and TFLOP/s
    python -m tests.tables.roofline --docs docs/roofline.md                  # fill the page's table, draw its picture

This is a calculation (`benchmarks/roofline.py`), and no GPU is used.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.options import among, numbers, output, parser, positive, quantity
from benchmarks.roofline import DTYPES, GPUS, MODELS, Gpu, Work, floor, free, parts, quotes, refresh
from dllm_sampler.cli.terminal import command
from dllm_sampler.host import files
from tests.tables import markdown

COMMAND = "python -m tests.tables.roofline"


def floors(name: str, gpu: Gpu, options: argparse.Namespace) -> tuple[list[str], list[list[str]]]:
    """Head and rows of one table: batch against window, milliseconds."""
    model = MODELS[name]
    rows = []
    for batch in options.batch:
        work = replace(options.work, batch=batch)
        each = (filter(None, quotes(model, gpu, replace(work, window=w))) for w in options.windows)
        cells = [" / ".join(f"{seconds * 1e3:.2f}" for seconds in found) for found in each]
        rows.append([str(batch), *cells, f"{refresh(model, gpu, work) * 1e3:.1f}", str(free(model, gpu, work))])
    return ["batch", *(f"window {w}" for w in options.windows), f"refresh of {options.slots}", "free"], rows


def shares(name: str, gpu: Gpu, work: Work) -> tuple[list[str], list[list[str]]]:
    """Head and rows of one table: the parts of one forward."""
    slower = DTYPES[work.dtype][1]
    found = parts(MODELS[name], work, gpu.cache)
    whole = sum(part.seconds(gpu, slower) for part in found)
    rows = [
        [
            part.name,
            f"{part.bytes / 1e6:.1f}",
            f"{part.flops / 1e9:.1f}",
            f"{part.seconds(gpu, slower) * 1e3:.3f}",
            f"{part.seconds(gpu, slower) / whole:.1%}",
            part.bound(gpu, slower),
        ]
        for part in found
    ]
    total = [f"{sum(p.bytes for p in found) / 1e6:.1f}", f"{sum(p.flops for p in found) / 1e9:.1f}"]
    return ["part", "MB", "GFLOP", "ms", "share", "bound by"], [*rows, ["all", *total, f"{whole * 1e3:.3f}", "", ""]]


def shown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal."""
    table = Table(title=title, title_justify="left")
    for column in head:
        table.add_column(column, justify="left" if column in ("part", "bound by") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def draw(path: Path, gpu: Gpu, options: argparse.Namespace) -> None:
    """Floor against window, one panel per model and a line per batch; a dot ends the windows that are nearly free."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    windows = [2 ** (i / 4) for i in range(4 * 10 + 1)]  # 1 to 1024
    figure, panels = pyplot.subplots(
        1, len(options.models), figsize=(4 * len(options.models), 4), squeeze=False, sharey=True, layout="constrained"
    )
    colours = pyplot.get_cmap("viridis")
    for axes, name in zip(panels[0], options.models, strict=True):
        for i, batch in enumerate(options.batch):
            work = replace(options.work, batch=batch)
            rounded = sorted({round(w) for w in windows})
            times = [floor(MODELS[name], gpu, replace(work, window=w)) * 1e3 for w in rounded]
            colour = colours(0.9 * i / max(1, len(options.batch) - 1))
            axes.plot(rounded, times, color=colour, label=f"batch {batch}")
            edge = free(MODELS[name], gpu, work)
            if edge <= rounded[-1]:
                axes.plot(edge, floor(MODELS[name], gpu, replace(work, window=edge)) * 1e3, "o", color=colour, ms=5)
        axes.set(xscale="log", yscale="log", title=name, xlabel="positions per row in a forward")
        axes.set_xticks([1, 8, 32, 128, 1024], ["1", "8", "32", "128", "1024"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(
        f"floor of a forward, ms (lower is better)\n{gpu.name}, {options.dtype}, {options.slots} slots"
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    dot = Line2D([], [], color="0.4", marker="o", linestyle="", markersize=5)
    told = "widest window whose floor is at most a tenth above that of one position"
    figure.legend([*handles, dot], [*labels, told], loc="outside lower center", ncols=len(labels) + 1, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    files.write(path, drawn.getvalue())
    pyplot.close(figure)


def page(path: Path, gpu: Gpu, options: argparse.Namespace) -> None:
    """Fill a document's table, which has every second batch and window, and draw its picture next to it."""
    text = markdown.read(path, "floors")
    few = argparse.Namespace(**vars(options))
    few.batch, few.windows = options.batch[::2], options.windows[::2]
    rows, head = [], []
    for name in options.models:
        head, found = floors(name, gpu, few)
        rows += [[name, *row] for row in found]
    heading = (
        f"{gpu.name} at {gpu.bandwidth / 1e12:g} TB/s and {gpu.peak / 1e12:g} TFLOP/s, {options.dtype},"
        f" {options.slots} slots; milliseconds."
    )
    text = markdown.fill(text, "floors", f"{heading}\n\n{markdown.table(['model', *head], rows)}")
    files.write(path, text)
    draw(path.with_suffix(".png"), gpu, options)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    it.prog = COMMAND
    add = it.add_argument
    add("--models", type=among("model", MODELS), default=",".join(MODELS), help="shapes (default %(default)s)")
    gpus = among("GPU", GPUS)
    add("--gpus", type=gpus, default="h200,a100,h100,b200,mi300x", help="published figures (default %(default)s)")
    add("--batch", type=numbers, default="1,4,16,64", help="rows (default %(default)s)")
    add("--windows", type=numbers, default="8,16,32,64,128,256", help="positions per row (default %(default)s)")
    add("--slots", type=positive, default=1024, help="stored columns per row (default %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="of weights and all else (default %(default)s)")
    add("--fused-head", action="store_true", help="logits never reach memory")
    add("--int8", action="store_true", help="weights of layers as 8-bit integers (dense models)")
    add("--bandwidth", type=quantity, metavar="TB/S", help="of the one GPU of --gpus (default: the published figure)")
    add("--copy", type=quantity, metavar="TB/S", help="of a copy on that GPU: floors by both (default: by one)")
    add("--peak", type=quantity, metavar="TFLOP/S", help="of the one GPU of --gpus (default: the published figure)")
    add("--parts", action="store_true", help="also the parts of each batch at window 32")
    add("--json", type=output, metavar="FILE", help="write every part of every configuration there (default: nowhere)")
    add("--docs", type=output, metavar="FILE", help="fill this page's table, for the first GPU (default: none)")
    options = it.parse_args(argv)
    if (options.bandwidth or options.copy or options.peak) and len(options.gpus) > 1:
        given = ",".join(options.gpus)
        it.error(f"--bandwidth, --copy and --peak are figures of one GPU, not of {given}: name it with --gpus")
    if options.int8:
        dense = [name for name in options.models if MODELS[name].moe is None]
        if not dense:
            it.error(f"--int8 is for dense models, not for {','.join(options.models)}: experts stay as they are")
        options.models = dense
    if max(options.windows) > options.slots:
        it.error(f"--windows: {max(options.windows)} columns do not lie in --slots {options.slots}")
    options.work = Work(slots=options.slots, dtype=options.dtype, fused_head=options.fused_head, int8=options.int8)
    return options


@command(COMMAND)
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    gpus = [GPUS[name] for name in options.gpus]
    if options.bandwidth:
        gpus = [replace(gpus[0], bandwidth=options.bandwidth * 1e12)]
    if options.copy:
        gpus = [replace(gpus[0], copy=options.copy * 1e12)]
    if options.peak:
        gpus = [replace(gpus[0], peak=options.peak * 1e12)]
    console = Console(width=max(Console().width, 110))
    for gpu in gpus:
        for name in options.models:
            ridge = gpu.peak / gpu.bandwidth * DTYPES[options.dtype][0] / 2 / DTYPES[options.dtype][1]
            both = " (read / copy)" if gpu.copy else ""
            title = f"{name}, {gpu.name}: floor in ms{both}; up to {ridge:.0f} tokens reading is longer"
            console.print(shown(title, *floors(name, gpu, options)))
            for batch in options.batch if options.parts else ():
                work = replace(options.work, batch=batch)
                console.print(shown(f"{name}, {gpu.name}, batch {batch}, window 32", *shares(name, gpu, work)))
    console.print("free: the widest window whose floor is at most a tenth above that of one position")
    if options.json:
        found = [
            {"model": name, "gpu": asdict(gpu), "work": asdict(work), "seconds": floor(MODELS[name], gpu, work)}
            | {"parts": [asdict(part) for part in parts(MODELS[name], work, gpu.cache)]}
            for gpu in gpus
            for name in options.models
            for batch in options.batch
            for window in options.windows
            for work in [replace(options.work, batch=batch, window=window)]
        ]
        files.write(options.json, json.dumps(found, indent=1))
    if options.docs:
        page(options.docs, gpus[0], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
