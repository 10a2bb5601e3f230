"""The stages of `campaign.py`: each a command of this folder, and the figures that its file holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, float]
TINY, TINIEST = 120, 5  # seconds that a stage of the smoke run may take, and without which it is not begun


@dataclass(frozen=True)
class Stage:
    """One command, in a process of its own.

    name: as the user writes it
    asks: what it answers
    command, smoke: script and options, on a GPU and tiny on a CPU
    seconds: that it takes by estimate; it is stopped after twice as many
    read: its figures, of what the command wrote
    """

    name: str
    asks: str
    command: str
    smoke: str
    seconds: int
    read: Callable[[Any], Figures]

    def needs(self, smoke: bool) -> int:
        """Seconds without which it is not begun."""
        return TINIEST if smoke else self.seconds

    def limit(self, smoke: bool) -> int:
        """Seconds after which it is stopped."""
        return TINY if smoke else 2 * self.seconds


def ceilings(found: Any) -> Figures:
    """Bytes per second as TB/s, operations as TFLOP/s."""
    it = found["figures"]
    names = {"read": ("read TB/s", 1e-12), "copy": ("copy TB/s", 1e-12), "node": ("node us", 1e6)}
    names["product"] = ("product TFLOP/s", 1e-12)
    return {said: it[name] * factor for name, (said, factor) in names.items() if name in it}


def good(row: Any) -> bool:
    """Return True if a line has a valid figure: no failure, and no torch in place of the kernel."""
    return bool(row["seconds"]) and not row["note"]


def step(found: Any) -> Figures:
    """Return the figures of the first measured size."""
    row = next(row for row in found["rows"] if row["kind"] == "window" and good(row))
    ms = statistics.median(row["seconds"]) * 1e3
    model = statistics.median(row["model"]) * 1e3
    floors = {"over read": ms / 1e3 / row["read"], "over copy": ms / 1e3 / row["copy"]}
    return {"ms": ms, **floors, "outside": 1 - model / ms}


def sizes(found: Any) -> Figures:
    """Times over the floor of every size, by batch and window."""
    figures: Figures = {}
    for row in found["rows"]:
        if row["kind"] == "window" and good(row):
            seconds, size = statistics.median(row["seconds"]), f"{row['batch']} x {row['window']}"
            figures |= {f"{size} ms": seconds * 1e3, f"{size} over read": seconds / row["read"]}
    return figures


def speed(found: Any) -> Figures:
    """Return the speed as a multiple of the other loop's."""
    row = next(row for row in found["rows"] if row["plain"] and good(row))
    ratios = [theirs / ours for ours, theirs in zip(row["seconds"], row["plain"], strict=True)]
    seconds = {"ours s": statistics.median(row["seconds"]), "theirs s": statistics.median(row["plain"])}
    return {"speed": statistics.median(ratios), **seconds}


def products(found: Any) -> Figures:
    """Return a layer's figures: the library over its floor by rows; for the fewest, the kernel over the library."""
    layers = [row for row in found["rows"] if row["shape"] == "layer"]
    times = {(row["rows"], row["side"]): statistics.median(row["seconds"]) for row in layers}
    first = layers[0]["rows"]
    figures = {"library us": times[first, "library"] * 1e6, "floor us": layers[0]["floor"] * 1e6}
    if (first, "kernel") in times:
        figures["kernel over library"] = times[first, "kernel"] / times[first, "library"]
    library = [row for row in layers if row["side"] == "library"]
    return figures | {f"{row['rows']} rows over floor": times[row["rows"], "library"] / row["floor"] for row in library}


def tiles(found: Any) -> Figures:
    """The best tile of each shape, summed, over the library."""
    best: dict[str, float] = {}
    library: dict[str, float] = {}
    for row in found["rows"]:
        if good(row) and row["shape"] != "layer":
            into = library if row["side"] == "library" else best
            into[row["shape"]] = min(into.get(row["shape"], float("inf")), statistics.median(row["seconds"]))
    if not best:  # a CPU has no kernel
        return {"library us": sum(library.values()) * 1e6}
    return {"best over library": sum(best.values()) / sum(library[shape] for shape in best)}


def timeline(found: Any) -> Figures:
    """Microseconds per step of the fixed schedule; what the host costs under a threshold."""
    rules = {row["rule"]: row for row in found["rows"] if "span" in row and not row["note"]}
    fixed, figures = rules["fixed"], {}
    for name in ("span", "products", "attention", "head", "small", "gaps"):
        figures[f"{name} us"] = fixed[name]
    figures["small and gaps ms"] = (fixed["small"] + fixed["gaps"]) / 1e3
    if "threshold" in rules:
        figures["waits"] = rules["threshold"]["waits"] / rules["threshold"]["span"]
    return figures


def kernels(found: Any) -> Figures:
    """The share of the bandwidth of reading that each kernel reaches, by its name; on a CPU of its reference."""
    most = found["about"]["read GB/s"] * 1e9
    figures: Figures = {}
    for row in found["rows"]:
        seconds = row["kernel"] or row["reference"]
        if seconds and not row["note"]:
            figures[row["name"].replace(",", "")] = row["moved"] / statistics.median(seconds) / most
    return {"lowest": min(figures.values()), **figures}


def drafts(found: Any) -> Figures:
    """A step's time with branches over that with one, and the most that take at most a tenth longer."""
    times = {row["branches"]: statistics.median(row["seconds"]) for row in found["rows"]}
    over = {branches: seconds / times[1] for branches, seconds in times.items()}
    free = 1
    while over.get(free + 1, 2.0) <= 1.1:
        free += 1
    return {"free": float(free)} | {f"{branches} over 1": ratio for branches, ratio in over.items()}


def in_flight(found: Any) -> Figures:
    """Tokens per second, and the time of batch after batch over that in flight."""
    row = found["rows"][-1]
    flight, static = (statistics.median(row["seconds"][way]) for way in ("in_flight", "static"))
    return {"tokens/s": row["tokens"] / flight, "static over in flight": static / flight}


STEP = "decode_step.py --smoke --kinds window --windows 4 --batch 1 --slots 16"
LOOP = "decode_step.py --smoke --windows 4 --slots 16 --kinds"
STAGES = [
    Stage("ceilings", "versions; bandwidth by copy and by read; a graph's node; a large product", "ceilings.py",
          "ceilings.py --smoke", 30, ceilings),
    Stage("step", "a step of one row of 32, its floor, and the share outside the model",
          "decode_step.py --kinds window --sides graph --batch 1 --windows 32", STEP, 60, step),
    Stage("uncached", "ours with dual cache and graphs over LLaDA's published loop, which has no cache",
          "decode_step.py --kinds uncached --sides graph --windows 32", f"{LOOP} uncached", 60, speed),
    Stage("products", "the four products of a layer at 1 to 256 rows", "products.py", "products.py --smoke",
          75, products),
    Stage("timeline", "a replayed generation by kernel, and the gaps between them", "timeline.py",
          "timeline.py --smoke", 60, timeline),
    Stage("batches", "steps of 4, 16 and 64 rows",
          "decode_step.py --kinds window --sides graph --batch 4,16,64 --windows 32 --repeats 1",
          "decode_step.py --smoke --kinds window --windows 4 --batch 1,2 --slots 16", 75, sizes),
    Stage("dual", "ours over a loop with the dual cache, as Fast-dLLM has it",
          "decode_step.py --kinds generate --sides graph --windows 32", f"{LOOP} generate", 45, speed),
    Stage("head", "the head of 16 rows against memory", "kernels.py --repeats 5 --only 'head 16 x 4096'",
          "kernels.py --smoke --only 'head 4 x 64'", 45, kernels),
    Stage("attention", "attention of one row of 32 against memory", "kernels.py --repeats 5 --only 'attention 1 x 32'",
          "kernels.py --smoke --only 'attention 2 x 8'", 45, kernels),
    Stage("windows", "steps of one row of 8 to 256",
          "decode_step.py --kinds window --sides graph --batch 1 --windows 8,16,64,128,256 --repeats 1",
          "decode_step.py --smoke --kinds window --windows 4,8 --batch 1 --slots 16", 75, sizes),
    Stage("int8", "a step with 8-bit weights", "decode_step.py --kinds window --sides int8 --batch 1 --windows 32",
          STEP, 60, step),
    Stage("drafts", "a step's time by the drafts in it",
          "branches.py --model llada-8b --branches 1,2,3,4,5,6,7,8 --repeats 3",
          "branches.py --model smoke --branches 1,2 --repeats 1", 75, drafts),
    Stage("in_flight", "tokens per second of many prompts, 16 at once",
          "in_flight.py --model llada-8b --graph --clock wall --schedulers fixed --caches dual --batch 16 --prompts 48"
          " --shortest 32 --tokens 128 --block 32 --repeats 1",
          "in_flight.py --model smoke --prompts 4 --batch 2 --caches dual --shortest 8 --tokens 16 --repeats 1",
          60, in_flight),
    Stage("tiles", "the kernel's product of 32 rows in other tiles", "products.py --rows 32 --tiles --repeats 3",
          "products.py --smoke --rows 4 --tiles", 90, tiles),
    Stage("compiled", "a step whose small operations torch.compile made",
          "decode_step.py --kinds window --sides compiled --batch 1 --windows 32", STEP, 100, step),
]  # fmt: skip
