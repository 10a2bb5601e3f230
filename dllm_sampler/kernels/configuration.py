"""How a kernel is compiled: what its tests launch, what is compiled ahead of time and what a GPU runs are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Stages = int | Callable[[int], int]


@dataclass(frozen=True)
class Configuration:
    """One specialisation of a kernel.

    Every module of this package that has kernels lists its own in `CONFIGURATIONS`.

    name: of the kernel and what sets this one apart, such as "readout bf16 V=126464"
    kernel: the `triton.jit` function
    signature: Triton's type of each argument, such as "*bf16", "i32", or "constexpr"
    constants: the values of those that are "constexpr"
    warps, stages: as in a launch; stages may be a function of the bytes of shared memory that a program may have
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: Stages = 2


# Triton's functions of these names are for kernels too, and so are said to return what a launch cannot count with.


def cdiv(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least power of two that is `size` at least; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
