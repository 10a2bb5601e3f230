"""Duration of a decoding step, against the floor by memory and arithmetic.

    python benchmarks/decode_step.py                                   # on a GPU: LLaDA-8B's shape, random weights
    python benchmarks/decode_step.py --sides torch,triton --batch 1 --windows 32 --json steps.json
    python benchmarks/decode_step.py --smoke                           # tiny, once: does it run?

A row has `--slots` columns. The last `window` columns are one block under the dual cache: the first forward computes
and stores every slot (`refresh`), each later one the window. A step is timed from its first launch until the host
knows what came of it; figures are medians over steps and repeats, with the range. Each line is printed, and in
`--json`, as soon as it is measured; the sides of one size follow one another. What fails is a line that says so, and a
side that fell back to torch says that too.

`floor`     what `roofline.py` computes for the same work at the bandwidth of reading and the rate of a matrix product,
            both measured in this run. `over read` is the time over it, a tenth above it 1.10; `over copy` is the time
            over the floor at the bandwidth of a copy, which is lower than that of reading.
`outside`   the share of a step that is not the model: its time without the body and the head, over its time. The model
            alone does what it does in the step: where the readout's kernel multiplies the head, it counts as the
            model, and where the step is a graph, so is the model. A graph is good for one size of step; steps of more
            than `graphs.MOST` positions (a refresh, a large batch) run without one on every side.
`speed`     tokens per second of `Sampler.generate` over those of another loop, same weights, same schedule, same run,
            same number of forwards; how many of the tokens differ is reported. There are three such lines:
            `generate`, ours with the dual cache over the plain loop of `official_style.py` with the dual cache, as
            Fast-dLLM has it; tokens may differ in half precision.
            `uncached`, ours with the dual cache over a loop without a cache, as LLaDA publishes it: its own code with
            `--official FILE`, else `official_style.py`. The cache changes tokens: this is how much faster, not equal.
            It depends on the prompt, which has all of `--slots` but the answer's four windows.
            `official`, with `--official FILE`: ours without a cache over LLaDA's published code (`official_code.py`).
`readout`   a readout of 1024 rows of logits, whose floor is their bytes over the bandwidth.

Sides: `torch`; `triton`, the kernels; `graph`, the kernels and one CUDA graph a step; `compiled`, a graph with
`torch.compile` for all but the model and the readout (`compile=step`); `int8`, a graph of the model with 8-bit weights
(`model.quantize=int8`), against the floor of those. No other loop has such weights: that side has no `speed`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import official_code
import official_style
import roofline
import torch
from circumstances import attempt, circumstances, save, show
from clocks import Clock, bandwidth, peak, size
from decode_row import HEADS, Row, cells, line
from options import accepted, add_json, add_smoke, among, check_gpu, command, numbers, parsed, parser, positive
from rich.console import Console
from spy import Spy
from torch import Tensor
from untrained import llada

from dllm_sampler.engine import layout
from dllm_sampler.engine.capture import GraphRecorder
from dllm_sampler.engine.graphs import MOST, StaticEngine
from dllm_sampler.engine.loop import Engine
from dllm_sampler.kernels.backend import TORCH, select
from dllm_sampler.kernels.sampling import Sampling
from dllm_sampler.models import fused, quantized
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.sampler import Sampler

SIDES = ("torch", "triton", "graph", "compiled", "int8")
RECORDED = ("graph", "compiled", "int8")
KINDS = ("readout", "generate", "uncached", "official", "window")


class Bench:
    """One model on one device."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() and not options.smoke else "cpu")
        gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if gpu else torch.float32
        shape = (126464, 4096, 12288, 32, 32) if gpu else (640, 64, 128, 2, 4)
        self.denoiser: TransformerDenoiser = llada(*shape, str(self.device), self.dtype)
        self.network = self.denoiser.transformer
        if gpu:
            fused.join(self.network)
        self.clock = Clock(self.device)
        self.moves, self.peak = bandwidth(self.clock), peak(self.clock, self.dtype)
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if gpu else 0
        self.limits = roofline.Gpu("measured", self.moves.read, self.peak, cache, self.moves.copy)

    def now(self, run: Callable[[], object]) -> float:
        """Seconds of a call on the host's clock, the device's work included."""
        self.wait()
        begun = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def row(self, kind: str, batch: int, window: int, computed: int, asked: int, side: str) -> Row:
        """A line with the floors of a forward of that many positions and answers per row."""
        fused = side != "torch"
        work = roofline.Work(batch, computed, self.options.slots, asked, fused_head=fused, int8=side == "int8")
        return Row(kind, side, batch, window, *roofline.quotes(self.network.config, self.limits, work))

    def prompts(self, batch: int, length: int) -> Tensor:
        ids = torch.randint(self.network.config.vocab_size - 2, (batch, length), generator=torch.manual_seed(1))
        return ids + 2  # neither the end nor the mask

    @cached_property
    def integers(self) -> TransformerDenoiser:
        """The model with 8-bit weights."""
        network = copy.deepcopy(self.network)
        quantized.quantize(network, self.device)
        return replace(self.denoiser, model=network)

    def model(self, side: str) -> TransformerDenoiser:
        return self.integers if side == "int8" else self.denoiser

    def sampler(self, window: int, side: str, cache: str = "dual", **options: Any) -> Sampler:
        chosen = {"scheduler": "fixed", "blocks": {"name": "fixed", "length": window}, "stop": "none"} | options
        return Sampler(self.model(side), cache=cache, **chosen)

    def steps(self, side: str, batch: int, window: int) -> list[Row]:
        """Every forward of one block, several times; the first refreshes."""
        kernels = TORCH if side == "torch" else select("triton", self.device, self.dtype)
        sampler, spy = self.sampler(window, side), Spy(self.model(side).using(kernels), kernels)
        graph, record = side in RECORDED, GraphRecorder()
        if graph:
            compiled = side == "compiled"
            engine: Engine = StaticEngine(spy, sampler.plugins, kernels, record, compile=compiled)
        else:
            engine = Engine(spy, sampler.plugins, kernels)
        prompts = self.prompts(batch, self.options.slots - window).tolist()
        # The rows asked about become fewer; the floor is that of half of them.
        window_row = self.row("window", batch, window, window, max(1, window // 2), side)
        refresh = self.row("refresh", batch, window, self.options.slots, window, side)
        # By the step that ran eagerly, for those after it too, with what it reads: a recording does not keep that.
        alone: dict[int, tuple[Callable[[], None], partial[None]]] = {}
        for repeat in range(self.options.repeats + 2):  # two to warm up: compile, then record
            canvas = layout.canvas(
                prompts, window, range(batch), spy.spec, sampler.plugins.blocks, sampler.noise, cuts=False
            )
            state, spy.last = None, None
            if not graph:  # or the slots of two generations live at once
                alone.clear()
            state = engine.begin(canvas)  # makes the slots, which belongs to no step
            for step in range(window):
                row, spy.last = window_row if step else refresh, None
                assert state.wanted is not None
                recorded = graph and state.wanted.sizes.computed <= MOST
                seconds = self.now(partial(engine.advance, state))
                if spy.last is not None:  # a replay asks nothing
                    again = partial(spy.again, spy.last)
                    alone[step] = (record(again) if recorded else again), again
                if repeat > 1:
                    row.seconds.append(seconds)
                    row.model.append(self.now(alone[max(one for one in alone if one <= step)][0]))
            engine.end(state)
        return [window_row, refresh]

    def tokens(self) -> tuple[int, int]:
        """Window and new tokens of a generation: four blocks, or half of the slots."""
        window = self.options.windows[0]
        return window, min(4, self.options.slots // 2 // window) * window

    def generate(self, kind: str, side: str) -> Row:
        """Sampler and another loop on the same schedule, one token a step, blocks of a window; kinds as above."""
        options, (window, tokens) = self.options, self.tokens()
        row = Row(kind, side, 1, window)
        chosen: dict[str, Any] = {"backend": "torch" if side == "torch" else "triton"}
        chosen |= {"cuda_graph": side in RECORDED, "compile": "step" if side == "compiled" else False}
        sampler = self.sampler(window, side, "none" if kind == "official" else "dual", **chosen)
        prompts = self.prompts(1, options.slots - tokens)
        given, found = prompts.to(self.device), {}
        published = options.official if kind != "generate" else None

        def ours() -> None:
            result = sampler.generate(prompts, max_new_tokens=tokens)
            # `result.tokens` has padding after the end-of-text token, and the other loops have tokens there.
            found["ours"] = result.trace.ids[:, result.trace.origin :], int(result.nfe)

        def theirs() -> None:
            work = self.network, given, tokens, window, tokens, 1
            if published is None:
                answer, forwards = official_style.generate(*work, dual=kind == "generate")
            else:
                answer, forwards = official_code.generate(published, *work)
            found["theirs"] = answer.cpu(), forwards

        other = {"generate": "the plain loop's", "uncached": "the loop's without a cache"}.get(kind)
        other = other if published is None else "the published code's"
        for repeat in range(options.repeats + 2):  # two to warm up: compile, then record
            seconds = self.now(ours), self.now(theirs)
            forwards, needed = (found[which][1] for which in ("ours", "theirs"))
            if forwards != needed:
                raise RuntimeError(f"the sampler took {forwards} forwards, and {other} are {needed}")
            if repeat > 1:
                row.seconds.append(seconds[0])
                row.plain.append(seconds[1])
        differ = int((found["ours"][0] != found["theirs"][0]).sum())
        row.answers = f"{tokens} tokens, {differ} of them differ from {other}"
        return row

    def readout(self, side: str) -> Row:
        """The readout alone, of many rows."""
        rows, vocab = (1024 if self.device.type == "cuda" else 16), self.network.config.vocab_size
        logits = torch.randn(rows, vocab, device=self.device, dtype=self.dtype)
        it = TORCH if side == "torch" else select("triton", self.device, self.dtype)
        row = Row("readout", side, rows, 1, size(logits) / self.moves.read, size(logits) / self.moves.copy)
        for repeat in range(self.options.repeats + 1):
            seconds = self.clock(lambda: it.readout(logits, Sampling(1)))
            if repeat:
                row.seconds.append(seconds)
        return row

    def measure(self) -> Iterator[Row]:
        """Every line; all sides of one before the next."""
        options, first = self.options, self.options.windows[0]
        if "readout" in options.kinds:
            for side in options.sides:
                yield from self._guarded("readout", side, 0, 0, lambda side=side: [self.readout(side)])
        for kind in ("generate", "uncached", "official"):
            for side in options.sides if kind in options.kinds else ():
                if side != "int8":
                    run = lambda side=side, kind=kind: [self.generate(kind, side)]  # noqa: E731
                    yield from self._guarded(kind, side, 1, first, run)
        if "window" not in options.kinds:
            return
        wanted = [(1, window) for window in options.windows] + [(batch, first) for batch in options.batch]
        for batch, window in dict.fromkeys(wanted):
            for side in options.sides:
                run = lambda side=side, batch=batch, window=window: self.steps(side, batch, window)  # noqa: E731
                yield from self._guarded("window", side, batch, window, run)

    def _guarded(self, kind: str, side: str, batch: int, window: int, run: Callable[[], list[Row]]) -> list[Row]:
        """Measure, and note a failure or a fallback in the line, so that the others are measured all the same."""
        found, note = attempt(run)
        with suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()
        rows = found or [Row(kind, side, batch, window)]
        for row in rows:
            row.note = "; ".join(filter(None, (row.note, note)))
        return rows


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--sides", type=among("side", SIDES), default=",".join(SIDES), help="what to measure (default %(default)s)")
    known = ",".join(KINDS)
    add("--kinds", type=among("kind", KINDS), help=f"of {known} (default all; official with --official)")
    add("--batch", type=numbers, default="1,4,16,64", help="batch sizes, with the first window (default %(default)s)")
    add(
        "--windows",
        type=numbers,
        default="32,8,16,64,128,256",
        help="columns of a window, at batch 1 (default %(default)s)",
    )
    add("--slots", type=positive, default=1024, help="columns of a row (default %(default)s)")
    add("--repeats", type=positive, default=3, help="blocks to measure (default %(default)s)")
    official = accepted(official_code.load)
    add("--official", type=official, metavar="FILE", help="LLaDA's own generate.py, to compare with (default: none)")
    add_json(it)
    add_smoke(it)
    options = parsed(it, argv, sides="torch", batch="1,2", windows="8,4", slots=32, repeats=1)
    if options.smoke and options.sides != ["torch"]:
        it.error(f"--sides {','.join(options.sides)}: --smoke runs on the CPU, which has only --sides torch")
    check_gpu(it, options, "a model of 8 billion parameters needs a GPU")
    if options.kinds is None:
        options.kinds = [kind for kind in KINDS if kind != "official" or options.official]
    elif "official" in options.kinds and not options.official:
        it.error("--kinds official compares with LLaDA's own generate.py: say where it is with --official FILE")
    for window in options.windows:
        if not 2 <= window <= options.slots // 2:
            it.error(f"--windows {window}: should be at least 2 and at most half of --slots {options.slots}")
    return options


@command
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    bench = Bench(options)
    about = circumstances()
    about |= bench.moves.about() | {"product TFLOP/s": round(bench.peak / 1e12, 3)}
    show(Console(), about)
    print(line(HEADS), flush=True)
    rows: list[Row] = []
    for row in bench.measure():
        rows.append(row)
        print(line(cells(row)), flush=True)
        save(options.json, about, rows=[asdict(one) for one in rows])
    if bench.device.type == "cpu":
        print("A tiny model on a CPU: nothing about a GPU was measured, and no kernel or graph ran.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
