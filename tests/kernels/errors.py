"""The largest error of each kernel over random inputs, which docs/kernels.md quotes.

    TRITON_INTERPRET=1 python -m tests.kernels.errors            # in Triton's interpreter
    python -m tests.kernels.errors --device cuda                 # on a GPU

The cases are those of the checks in this folder, whose bounds they must keep. Errors are against float64: of layers
relative to the largest answer (the interpreter cuts bfloat16 off where a GPU rounds), of readout and head as the
largest of a logsumexp over the largest logit, a probability (relative) and an entropy (nats).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from dllm_sampler.core.values import Readout
from dllm_sampler.kernels import attention, head, linear, norm, readout, rope, swiglu
from tests.kernels import checks, oracles, readout_checks

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
REFERENCES = (
    (checks.reference, "attention", attention.packed_attention), (checks.norms, "norm_reference", norm.norm),
    (checks.ropes, "qkv_rope_reference", rope.qkv_rope), (checks.swiglus, "swiglu_reference", swiglu.swiglu),
    (checks.linears, "linear_reference", linear.linear),
)  # fmt: skip
Cases = dict[str, Callable[[int, torch.dtype], None]]


def cases(device: str) -> Cases:
    """What is run with each seed and dtype."""

    def attend(seed: int, dtype: torch.dtype) -> None:
        counts, grid = ((1, 0, 2), (5, 1), (17, 0, 3))[seed % 3], (None, 4)[seed % 2]
        drafts = {"candidates": 1 + seed % 4 // 3, "keys": ("stored", "both", "fresh")[seed % 5 % 3]}
        given, options = oracles.pack(
            seed, dtype, counts=counts, length=60, heads=6, grid=grid, splits=1 + seed % 3, **drafts
        )
        checks.attention(given, options, device)

    def turn(seed: int, dtype: torch.dtype) -> None:
        flags = {"norm": seed % 3 > 0, "slots": seed % 5 > 0, "fresh": True, "shaped": False}
        checks.rope(seed, dtype, 4, 2, 64, 64 if seed % 2 else 32, **flags, device=device)

    def read(seed: int, dtype: torch.dtype) -> None:
        readout_checks.readout_against_float64(readout.readout, device, dtype, 1 + seed % 3, 500 + 701 * seed)

    def multiply(seed: int, dtype: torch.dtype) -> None:
        readout_checks.head_against_float64(head.head, device, dtype, 1 + 15 * (seed % 6), 300 + seed, 30)

    return {
        "readout": read,
        "head": multiply,
        "attention": attend,
        "norm": lambda seed, dtype: checks.norm(seed, (2, 3, 128), dtype, seed % 2 > 0, 3.0, device),
        "qkv_rope": turn,
        "swiglu": lambda seed, dtype: checks.swiglu(seed, (2, 3, 300), dtype, seed % 2 > 0, 3.0, device),
        "linear": lambda seed, dtype: checks.linear(seed, 1 + 5 * (seed % 9), 100, 600, dtype, seed % 2 > 0, device),
    }


def worst(device: str, seeds: int) -> dict[tuple[str, str], list[float]]:
    """By kernel and dtype: one number, or three of readout and head."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    here = "", ""
    close, compare = checks.close, readout_checks.compare

    def keep(*numbers: float) -> None:
        old = found[here] or [0.0] * len(numbers)
        found[here] = [max(pair) for pair in zip(old, numbers, strict=True)]

    def closer(got: Tensor, want: Tensor, dtype: torch.dtype, roundings: float = 2) -> None:
        close(got, want, dtype, roundings)
        if want.numel():
            scale = max(1.0, float(want.abs().max()))
            keep(float((got.double().cpu() - want.double().cpu()).abs().max()) / scale)

    def compared(got: Readout, want: dict[str, Tensor], size: float = 1.0) -> None:
        compare(got, want, size)
        apart = {name: (getattr(got, name).cpu() - value).abs() for name, value in want.items()}
        relative = apart["confidence"] / want["confidence"]
        keep(float(apart["logsumexp"].max()) / size, float(relative.max()), float(apart["entropy"].max()))

    patches = [patch.object(owner, name, kernel) for owner, name, kernel in REFERENCES]
    patches += [patch.object(checks, "close", closer), patch.object(readout_checks, "compare", compared)]
    for one in patches:
        one.start()
    try:
        for kernel, run in cases(device).items():
            for name, dtype in DTYPES.items():
                here = kernel, name
                for seed in range(seeds):
                    run(seed, dtype)
    finally:
        for one in patches:
            one.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu, in the interpreter")
    parser.add_argument("--seeds", type=int, default=12, help="cases for each kernel and dtype (default 12)")
    options = parser.parse_args()
    for (kernel, dtype), numbers in worst(options.device, options.seeds).items():
        print(f"{kernel:10} {dtype:9}", *(f"{number:.1e}" for number in numbers))


if __name__ == "__main__":
    main()
