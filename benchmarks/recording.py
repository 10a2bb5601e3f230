"""What a trace costs: sampling with the recorder, with the entropy besides, and without either, in turns.

    python benchmarks/recording.py                                     # mini, batch 8
    python benchmarks/recording.py --models mini llada-157m --repeats 9

Times are process time, so that a shared machine disturbs less; a ratio is to the run without, of the same repeat.
Bytes per column of a row are what the recorder's buffers hold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from circumstances import circumstances, show
from options import command, parser
from rich.console import Console
from subjects import SIZES, Subject, check, subject

from dllm_sampler.core.trace import Recorder
from dllm_sampler.eval.arguments import positive
from dllm_sampler.sampler import Sampler


def arms(it: Subject, batch: int, steps: int) -> dict[str, Callable[[], float]]:
    """Process seconds of one generation, by what is recorded."""
    prompts = it.prompts(batch).tolist()

    def run(entropy: bool, records: bool) -> float:
        base = it.sampler("none", steps)
        sampler = Sampler(
            it.denoiser, scheduler=base.plugins.scheduler, blocks=base.plugins.blocks, stop="none", cache="none",
            temperature=1.0, entropy=entropy,
        )  # fmt: skip
        with patch.object(Recorder, "note", Recorder.note if records else _nothing):
            begun = time.process_time()
            sampler.generate(prompts, max_new_tokens=it.new_tokens)
            return time.process_time() - begun

    return {
        "nothing": lambda: run(False, False),
        "trace": lambda: run(False, True),
        "trace and entropy": lambda: run(True, True),
    }


def _nothing(*_: object) -> None:
    """In place of `Recorder.note`."""


def size(entropy: bool) -> int:
    """Bytes per column of a row."""
    it = subject("smoke")
    sampler = Sampler(it.denoiser, entropy=entropy)
    trace = sampler.generate(it.prompts(1).tolist(), max_new_tokens=4).trace
    kept = (trace.step_map, trace.gone, trace.logprob, trace.entropy)
    return sum(tensor.element_size() for tensor in kept if tensor is not None)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--models", nargs="+", choices=SIZES, default=["mini"], help="llada-8b needs a GPU (default mini)")
    add("--batch", type=positive, default=8, help="rows of a generation (default %(default)s)")
    add("--steps", type=positive, default=32, help="forwards per generation (default %(default)s)")
    add("--repeats", type=positive, default=7, help="generations timed of each (default %(default)s)")
    add("--threads", type=positive, default=1, help="of torch (default %(default)s)")
    options = it.parse_args(words)
    for name in options.models:
        check(name, options.steps)
    return options


@command
def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = arguments(words)
    torch.set_num_threads(options.threads)
    show(Console(), circumstances())
    print(f"bytes per column: {size(False)}, with the entropy {size(True)}")
    for name in options.models:
        each = arms(subject(name), options.batch, options.steps)
        found: dict[str, list[float]] = {arm: [] for arm in each}
        for repeat in range(options.repeats + 1):
            for arm, run in each.items():
                seconds = run()
                if repeat:  # the first one warms up
                    found[arm].append(seconds)
        for arm, seconds in found.items():
            ratios = [one / other for one, other in zip(seconds, found["nothing"], strict=True)]
            print(
                f"{name}, batch {options.batch}, {arm}: {statistics.median(seconds):.3f} s, ratio"
                f" {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
