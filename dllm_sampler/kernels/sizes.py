"""Sizes of launches.

Triton types its functions of these names for kernels: pyright lets no launch compute with their results.
"""


def cdiv(size: int, part: int) -> int:
    """Return `size / part`, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """Return the least power of two of at least `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
