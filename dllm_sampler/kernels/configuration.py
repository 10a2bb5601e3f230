"""Values to compile kernels with. Tests, ahead-of-time compilation and launches on a GPU share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """One specialisation of a kernel.

    Every module of this package that has kernels lists its own in `CONFIGURATIONS`.

    name: of the kernel and what sets this one apart, such as "readout bf16 V=126464"
    kernel: the `triton.jit` function
    signature: Triton's type of each argument, such as "*bf16", "i32", or "constexpr"; "i32:16" for an integer that is a
        multiple of 16 in this launch, which Triton compiles a binary of its own for
    constants: the values of those that are "constexpr"
    warps, stages: as in a launch
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3  # Triton's own


# Triton's functions of these names are typed for kernels: pyright lets no launch compute with their results.


def cdiv(size: int, part: int) -> int:
    """`size / part`, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least power of two of at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
