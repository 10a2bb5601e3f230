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
from collections.abc import Callable
from unittest.mock import patch

import torch
from subjects import Subject, subject

from dllm_sampler.sampler import Sampler
from dllm_sampler.trace import Recorder


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


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mini"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
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
