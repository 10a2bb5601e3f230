"""How fast a forward can be at best: the bytes it must move and the operations it must do, part by part.

    python benchmarks/roofline.py                                          # floors of the shipped models and GPUs
    python benchmarks/roofline.py --models llada-8b --gpus h200 --parts    # which part is bound by what
    python benchmarks/roofline.py --gpus h200 --bandwidth 4.5 --copy 4.3 --peak 790   # measured there, TB/s and TFLOP/s
    python benchmarks/roofline.py --docs docs/roofline.md                  # fill the page's tables, draw its picture

No GPU is used. A part takes the longer of its bytes over the bandwidth and its operations over the peak; parts follow
one another. Launches, synchronisation and what a real kernel loses are left out: nothing measured is faster.

Every forward computes `window` positions per row against `slots` stored columns and answers for `asked` of them.
Counted once each: the weights touched (an even router reaches E (1 - (1 - k/E)^T) experts with T tokens), stored keys
and values read and fresh ones written, logits written and read. Tensors between launches are counted where the
widest of them does not fit into the GPU's cache: with the part that reads or writes them.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from options import add_smoke, among, command, numbers, parser, quantity
from rich.console import Console
from rich.table import Table

from dllm_sampler.core import files
from dllm_sampler.eval import markdown
from dllm_sampler.eval.arguments import output, positive
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import TransformerConfig


@dataclass(frozen=True)
class Gpu:
    """Figures of one GPU, published or measured."""

    name: str
    bandwidth: float  # bytes per second; where it was measured, of reading, which is most of a decoding step
    peak: float  # bfloat16 operations per second (dense)
    cache: float  # bytes
    copy: float | None = None  # bytes per second that a copy was seen to read and write


GPUS = {
    "a100": Gpu("A100 80GB SXM", 2.039e12, 312e12, 40e6),
    "h100": Gpu("H100 SXM", 3.35e12, 989e12, 50e6),
    "h200": Gpu("H200 SXM", 4.8e12, 989e12, 60e6),
    "b200": Gpu("B200", 8.0e12, 2250e12, 126e6),
    "mi300x": Gpu("MI300X", 5.3e12, 1307e12, 256e6),
}

MODELS = {
    "llada-8b": TransformerConfig(126464, 4096, 12288, 32, 32, 32, 128),
    "dream-7b": TransformerConfig(152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True),
    "sdar-8b": TransformerConfig(151936, 4096, 12288, 36, 32, 8, 128, qk_norm=True),
    "llada2-mini": TransformerConfig(
        157184, 2048, 5120, 20, 16, 4, 128, qk_norm=True, moe=MoeConfig(256, 8, 512, frozenset(range(1, 20)), 512)
    ),
}

# Bytes of a number, and how many times slower than bfloat16 matrices of it are multiplied (float32: as TF32).
DTYPES = {"bf16": (2, 1.0), "fp16": (2, 1.0), "fp32": (4, 2.0)}


@dataclass(frozen=True)
class Work:
    """One forward: `batch` rows of `window` positions, `slots` columns seen, `asked` positions answered for."""

    batch: int = 1
    window: int = 32
    slots: int = 1024
    asked: int | None = None  # default: the window
    dtype: str = "bf16"
    fused_head: bool = False  # logits never reach memory
    int8: bool = False  # the weights of the layers are 8-bit integers, with a float32 scale per output


@dataclass(frozen=True)
class Part:
    """What one part of the forward moves and does, over all layers."""

    name: str
    bytes: float
    flops: float

    def seconds(self, gpu: Gpu, slower: float = 1.0) -> float:
        """The part's floor."""
        return max(self.bytes / gpu.bandwidth, self.flops * slower / gpu.peak)

    def bound(self, gpu: Gpu, slower: float = 1.0) -> str:
        """What sets the floor."""
        return "memory" if self.bytes / gpu.bandwidth >= self.flops * slower / gpu.peak else "compute"


def parts(model: TransformerConfig, work: Work, cache: float = 0.0) -> list[Part]:
    """The parts of a forward; cache: bytes in which tensors between launches stay."""
    size, _ = DTYPES[work.dtype]
    tokens, layers = work.batch * work.window, model.num_layers
    asked = work.batch * (work.window if work.asked is None else work.asked)
    width, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    moe = model.moe
    sparse = 0 if moe is None else len(moe.layers)
    touched = used = (layers - sparse) * 3.0 * width * model.intermediate_size
    inner = float(model.intermediate_size)
    if moe is not None:
        expert, shared = 3 * width * moe.expert_size, 3 * width * moe.shared_size
        reached = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
        every = shared + moe.num_experts * width  # and the router
        touched += sparse * (reached * expert + every)
        used += sparse * (moe.top_k * expert + every)
        inner = (moe.top_k * moe.expert_size + moe.shared_size) * sparse / layers + inner * (layers - sparse) / layers
    spills = tokens * max(2 * inner, queries + 2 * keys) * size > cache

    def ends(numbers: float) -> float:
        """Bytes of tensors between launches, numbers per token and layer."""
        return layers * tokens * numbers * size * spills

    def linear(name: str, touched: float, used: float, numbers: float, outputs: float) -> Part:
        """touched: weights read; used: weights that multiply a token; numbers: at the ends; outputs: of a layer."""
        read = touched + layers * outputs * 4 if work.int8 else touched * size
        return Part(name, read + ends(numbers), 2.0 * tokens * used)

    heads, vocabulary = queries + 2 * keys, model.vocab_size
    stored = layers * work.batch * work.slots * 2 * keys * size
    return [
        linear("qkv", layers * width * heads, layers * width * heads, width + heads, heads),
        linear("o", layers * queries * width, layers * queries * width, queries + width, width),
        linear("mlp", touched, used, 2 * width + 3 * inner, 2 * inner + width),
        Part("kv read", stored + ends(2 * queries), layers * 4.0 * tokens * queries * work.slots),
        Part("kv write", layers * tokens * 2 * keys * size, 0),
        # The embedding; norms with their sums, heads split and turned, the gated product.
        Part("activations", tokens * width * size + ends(8 * width + 2 * heads + 3 * inner), 0),
        Part("head", vocabulary * width * size, 2.0 * asked * vocabulary * width),
        Part("logits", 0 if work.fused_head else 2.0 * asked * vocabulary * size, 0),
        # Ids, three flags and the answers' token, confidence and position.
        Part("sampler", work.batch * work.slots * 11 + asked * 20.0, 0),
    ]


def floor(model: TransformerConfig, gpu: Gpu, work: Work) -> float:
    """Seconds that no forward of this work can beat."""
    slower = DTYPES[work.dtype][1]
    return sum(part.seconds(gpu, slower) for part in parts(model, work, gpu.cache))


def quotes(model: TransformerConfig, gpu: Gpu, work: Work) -> tuple[float, float | None]:
    """The floor at the GPU's bandwidth, and at that of a copy if there is one."""
    return floor(model, gpu, work), None if gpu.copy is None else floor(model, replace(gpu, bandwidth=gpu.copy), work)


def free(model: TransformerConfig, gpu: Gpu, work: Work, rise: float = 0.1, most: int = 1 << 14) -> int:
    """The widest window per row whose floor is at most `rise` above that of one position."""
    limit = floor(model, gpu, replace(work, window=1)) * (1 + rise)
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if floor(model, gpu, replace(work, window=middle)) <= limit else (low, middle - 1)
    return low


def refresh(model: TransformerConfig, gpu: Gpu, work: Work) -> float:
    """The floor of a forward that computes every slot and answers for the window."""
    return floor(model, gpu, replace(work, window=work.slots, asked=work.window))


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


def page(path: Path, gpus: Sequence[Gpu], options: argparse.Namespace) -> None:
    """Fill a document's tables and draw its picture next to it."""
    text = markdown.read(path, "floors", "parts", "crossover")
    gpu = gpus[0]
    tables = []
    for name in options.models:
        tables.append(f"**{name}**\n\n{markdown.table(*floors(name, gpu, options))}")
    heading = (
        f"{gpu.name} at {gpu.bandwidth / 1e12:g} TB/s and {gpu.peak / 1e12:g} TFLOP/s, {options.dtype},"
        f" {options.slots} slots; milliseconds."
    )
    text = markdown.fill(text, "floors", "\n\n".join([heading, *tables]))
    work = options.work
    described = f"{options.models[0]}, {gpu.name}, batch 1, window {work.window}, {work.slots} slots."
    text = markdown.fill(text, "parts", f"{described}\n\n{markdown.table(*shares(options.models[0], gpu, work))}")
    rows = [
        [name, *(f"{floor(MODELS[name], g, work) * 1e3:.2f} / {free(MODELS[name], g, work)}" for g in gpus)]
        for name in options.models
    ]
    text = markdown.fill(text, "crossover", markdown.table(["model", *(g.name for g in gpus)], rows))
    files.write(path, text)
    draw(path.with_suffix(".png"), gpu, options)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
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
    add("--docs", type=output, metavar="FILE", help="fill this page's tables, for the first GPU (default: none)")
    add_smoke(it, "one model, one GPU, two batches")
    options = it.parse_args(argv)
    if options.smoke:
        options.models, options.gpus, options.batch, options.windows = ["llada-8b"], ["h200"], [1, 2], [8, 32]
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


@command
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
        page(options.docs, gpus, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
