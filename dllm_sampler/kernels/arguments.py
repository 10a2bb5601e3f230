"""Tensors as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor


def flags(*tables: Tensor | None) -> list[Tensor | None]:
    """Flags as bytes; other tables as they are."""
    return [table.view(torch.uint8) if table is not None and table.dtype == torch.bool else table for table in tables]


def lined(table: Tensor) -> Tensor:
    """With neighbours of a row together in memory."""
    return table if table.stride(-1) == 1 else table.contiguous()
