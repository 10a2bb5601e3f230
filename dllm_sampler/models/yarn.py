"""YaRN's rotary frequencies (arXiv 2309.00071), and the factor on queries that grows with the position."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """Stretched rotary positions, for a longer context.

    Args:
        factor: divisor of low frequencies.
        original: number of positions of the context before.
        fast: a frequency with at least as many turns within `original` is kept.
        slow: a frequency with at most as many turns within `original` is divided by `factor`.
        queries: rotated queries are multiplied by 1 + queries * ln(1 + floor(position / original)). 0 means by 1.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    queries: float = 0.0

    def stretched(self, frequencies: Tensor, theta: float, size: int) -> Tensor:
        """Return `frequencies [R/2]`, which are `theta ** -(2 i / R)` with R = `size`, stretched by YaRN's rule."""
        low, high = (
            size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.fast, self.slow)
        )
        first, last = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        place = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        # Between the two the share of the division rises evenly; where they meet it is a step.
        share = ((place - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies / self.factor * share + frequencies * (1 - share)

    def scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return `[N, 1, M, 1]` the factor on queries at `positions [N, M]`, or None if it is 1 everywhere."""
        if not self.queries:
            return None
        steps = (positions // self.original).to(dtype)
        return (1 + self.queries * torch.log1p(steps))[:, None, :, None]
