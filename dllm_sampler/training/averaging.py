"""A moving average of the weights that learn, with less of the noise of single steps (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Average(nn.Module):
    """The average `a = decay * a + (1 - decay) * w` of some weights w after each optimizer step.

    Args:
        learning: the weights, as they are before the first step; they may be spread over processes (FSDP2).
        decay: from 0 (the weights themselves) to below 1; about 1 / (1 - decay) last steps count.
        changed: called when the weights have others' values.
    """

    def __init__(self, learning: Sequence[nn.Parameter], decay: float, changed: Callable[[], None] = lambda: None):
        super().__init__()
        self._learning, self._decay, self._changed = list(learning), decay, changed
        self.weights = nn.ParameterList(nn.Parameter(each.detach().clone(), False) for each in learning)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of now."""
        for mean, weight in zip(self.weights, self._learning, strict=True):
            mean.mul_(self._decay).add_(weight, alpha=1 - self._decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The network gets the average, and the average keeps the network's weights, until the next swap."""
        for mean, weight in zip(self.weights, self._learning, strict=True):
            kept = weight.detach().clone()
            weight.copy_(mean)
            mean.copy_(kept)
        self._changed()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network has the average inside."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
