"""Where the time of a replayed generation goes: by kernel, and the gaps between kernels.

    python benchmarks/timeline.py --json timeline.json         # LLaDA-8B's shape, random weights, one row
    python benchmarks/timeline.py --smoke                      # tiny, on the CPU, operations in place of kernels

A generation is profiled after others have compiled and recorded its steps, once with a fixed schedule and once with a
threshold that nothing reaches, whose steps the host must look at. Microseconds, per step:

`busy`        some kernel ran
`gaps`        none ran, for less than 20 microseconds at a time: between the nodes of a graph
`waits`       none ran, for 20 microseconds or more: the host was not ready
`products` `attention` `head` `small`   time of the kernels of a kind; `small` is all else: norms, rotations, and the
              operations of the engine

The profiler slows the host down: waits are shorter without it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import decode_step
import torch
from circumstances import attempt, circumstances, save, show
from options import add_json, add_smoke, check_gpu, command, parsed, parser
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

WAIT = 20.0  # microseconds, from which on a gap is the host's
SHOWN = 25  # kernels that are listed
KINDS = {  # words in the names of kernels, in this order
    # The kernel that adds parts up has the same name for the head: one of 33 in a step of 32 layers.
    "attention": ("attention_kernel", "combine_kernel", "flash", "fmha", "scaled_dot_product"),
    "head": ("head_kernel", "readout_kernel"),
    "products": ("linear_kernel", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "aten::linear"),
}
RULES: dict[str, Any] = {"fixed": "fixed", "threshold": {"name": "threshold", "threshold": 2.0}}


class Event(NamedTuple):
    """One kernel's run; microseconds."""

    begin: float
    end: float
    name: str


def kind(name: str) -> str:
    """Return the kind of a kernel, by its name."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "small")


def summary(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Microseconds per step of a generation of that many steps, and each kernel's share."""
    ordered = sorted(events)
    if not ordered:
        raise RuntimeError("the profiler saw no kernel")
    kinds = dict.fromkeys((*KINDS, "small"), 0.0)
    runs: dict[str, list[float]] = {}
    gaps = waits = busy = 0.0
    over = ordered[0].begin
    for event in ordered:
        idle = max(0.0, event.begin - over)
        gaps, waits = (gaps, waits + idle) if idle >= WAIT else (gaps + idle, waits)
        busy += max(0.0, event.end - max(over, event.begin))
        over = max(over, event.end)
        kinds[kind(event.name)] += event.end - event.begin
        runs.setdefault(event.name, []).append(event.end - event.begin)
    parts = {"span": over - ordered[0].begin, "busy": busy, "gaps": gaps, "waits": waits, **kinds}
    kernels = [
        {"name": name, "runs": len(each), "us": sum(each), "median": statistics.median(each)}
        for name, each in sorted(runs.items(), key=lambda one: -sum(one[1]))
    ]
    return {"steps": steps, "nodes": len(ordered) / steps, "kernels": kernels[:SHOWN]} | {
        name: value / steps for name, value in parts.items()
    }


def profiled(bench: decode_step.Bench, rule: str) -> dict[str, Any]:
    """Profile the kernels of a generation."""
    window, tokens = bench.tokens()
    gpu = bench.device.type == "cuda"
    how = {"backend": "triton", "cuda_graph": True} if gpu else {"backend": "torch"}
    sampler = bench.sampler(window, "graph", scheduler=RULES[rule], **how)
    prompts = bench.prompts(1, bench.options.slots - tokens)
    for _ in range(3 if gpu else 1):  # compile, record, replay
        sampler.generate(prompts, max_new_tokens=tokens)
    seconds = bench.now(lambda: sampler.generate(prompts, max_new_tokens=tokens))
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        result = sampler.generate(prompts, max_new_tokens=tokens)
        bench.wait()
    events = [
        Event(one.time_range.start, one.time_range.end, one.name)
        for one in seen.events() or ()
        if one.device_type.name == ("CUDA" if gpu else "CPU") and (gpu or one.cpu_parent is None)
    ]
    return {"rule": rule, "seconds": seconds} | summary(events, int(result.nfe))


def said(found: dict[str, Any]) -> str:
    """One profile as people read it."""
    names = ("span", "busy", "gaps", "waits", *KINDS, "small")
    steps = f"{found['steps']} steps in {found['seconds'] * 1e3:.2f} ms, {found['nodes']:.0f} kernels a step"
    parts = ", ".join(f"{name} {found[name]:.1f}" for name in names)
    lines = [
        f"{one['us']:12.0f} us {one['runs']:6d} x {one['median']:9.2f}  {one['name'][:90]}" for one in found["kernels"]
    ]
    return "\n".join([f"{found['rule']}: {steps}", f"us per step: {parts}", *lines])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add_json(it)
    add_smoke(it)
    options = parsed(it, argv)
    check_gpu(it, options)
    return options


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    words = ["--smoke"] if options.smoke else ["--windows", "32"]
    bench = decode_step.Bench(decode_step.arguments(words))
    about, rows = circumstances(), []
    show(Console(), about)
    for rule in RULES:
        found, note = attempt(lambda rule=rule: profiled(bench, rule))
        rows.append((found or {"rule": rule}) | {"note": note})
        print(note or said(rows[-1]), flush=True)
        save(options.json, about, rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
