"""The clocks of the GPU benchmarks: one call with cold caches, many calls in one graph, and what memory can do.

Caches are emptied by reading. Emptying them by writing leaves lines that must go to memory before anything else can
take their place, and the call that is timed would pay for that. A call of microseconds is timed in a graph of many:
alone it would take less time than the events around it. Each call of the graph has data of its own, a gigabyte in all
or what 512 calls have (never less than 70 MB in `kernels.py`, where an H200's cache holds 50), so that little of it is
still in the cache when its turn comes again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from dllm_sampler.engine.capture import GraphRecorder

FLUSHES = 16  # about a millisecond on a GPU, in which the host is through with the launches of what is timed
TURN = 2**30  # bytes that the calls of a graph go through, as far as MOST calls do
MOST, FEWEST = 512, 8  # calls of a graph
TIMES = 10  # that a bandwidth is measured


def size(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Clock:
    """Seconds on the device, with cold caches."""

    def __init__(self, device: torch.device):
        self.device = device
        self.gpu = device.type == "cuda"
        self.flush = torch.ones(2**26 if self.gpu else 2**20, device=device)
        self.sum = torch.empty((), device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call. On a GPU it must take far longer than the microseconds of an event."""
        for _ in range(FLUSHES if self.gpu else 1):
            torch.sum(self.flush, 0, out=self.sum)
        if not self.gpu:
            begun = time.perf_counter()
            run()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def copies(self, moved: int) -> int:
        """Return the number of sets of data for calls that move that number of bytes."""
        return min(MOST, -(-TURN // moved)) if self.gpu else 2

    def replayed(self, runs: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Return a clock for the seconds of one of the runs, each with its own data. On a GPU, all are in one graph.

        Results are kept until the last run has ended, so that each has its own memory.
        """
        calls = list(islice(cycle(runs), max(FEWEST if self.gpu else 1, len(runs))))

        def every() -> None:
            _kept = [run() for run in calls]

        runs[0]()  # compiles, which a recording may not do
        again = GraphRecorder()(every) if self.gpu else every
        return lambda: self(again) / len(calls)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that memory was seen to move."""

    copy: float  # read and written ones
    read: float  # by a kernel that reads alone, as most of a decoding step does

    def about(self) -> dict[str, object]:
        """As a benchmark's circumstances have it."""
        return {"copy GB/s": round(self.copy / 1e9, 1), "read GB/s": round(self.read / 1e9, 1)}


def bandwidth(clock: Clock, count: int | None = None) -> Bandwidth:
    """Return the bandwidth of a copy, and of reading by the best number of programs. Both are medians.

    count: numbers of four bytes; by default 2^28 on a GPU, 2^22 elsewhere
    """
    count = count or (2**28 if clock.gpu else 2**22)
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)

    def seconds(run: Callable[[], object]) -> float:
        run()  # compiles
        return statistics.median(clock(run) for _ in range(TIMES))

    copied = 2 * size(source) / seconds(lambda: target.copy_(source))
    if not clock.gpu:
        return Bandwidth(copied, size(source) / seconds(source.max))
    from reading import largest  # needs triton

    processors = torch.cuda.get_device_properties(clock.device).multi_processor_count
    best = min(seconds(lambda n=n: largest(source, n * processors)) for n in (2, 4, 8))
    return Bandwidth(copied, size(source) / best)


def node(clock: Clock, count: int = 500) -> float:
    """Seconds that one more small operation takes in a graph; on a CPU, in a loop."""
    tiny = torch.zeros(32, 4096, device=clock.device)
    return clock.replayed([lambda: tiny.add_(1)] * (count if clock.gpu else 8))()


def peak(clock: Clock, dtype: torch.dtype) -> float:
    """Operations per second of a large square matrix product, the fastest of several: a floor needs the best."""
    width = 8192 if clock.gpu else 256
    a, b = (torch.randn(width, width, device=clock.device, dtype=dtype) for _ in range(2))
    return 2 * width**3 / min(clock(lambda: a @ b) for _ in range(TIMES))
