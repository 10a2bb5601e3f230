"""Sizes of launches.

Triton has functions of these names, but it types them for kernels, and pyright rejects their results in a launch.
"""


def cdiv(size: int, part: int) -> int:
    """Return `size / part`, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least `size`. Returns 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0
