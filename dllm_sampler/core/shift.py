"""Which row of the model's output predicts a token: its own, or under a shift the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllm_sampler.core.values import Canvas


class Predicts(Protocol):
    """What tells which row predicts a token: a `ModelSpec`, or a model."""

    @property
    def shift(self) -> bool:
        """Raw row i predicts token i + 1."""
        ...

    @property
    def seeds(self) -> bool:
        """The row before the active block predicts the block's first token."""
        ...


def predictors(canvas: Canvas, columns: Tensor, spec: Predicts, before: Tensor | None = None) -> Tensor:
    """`[B, Q]` the column whose hidden state predicts each of `columns [B, Q]`.

    Args:
        before: `[B] bool` rows of which every column is predicted by the one before it (`Query.shifted`); None: none.
    """
    # The row's very first position has none before it and reads its own; the empty slot stays what it is.
    if spec.shift:
        return torch.where((columns > 0) & (columns < canvas.length), columns - 1, columns)
    if spec.seeds:
        shifted = columns == canvas.start[:, None]
        if before is not None:
            shifted = shifted | (before[:, None] & (columns < canvas.length))
        return torch.where((columns > 0) & shifted, columns - 1, columns)
    return columns
