"""The grid of block-causal attention: which of its blocks the active block lies in.

Without a grid (`Canvas.grid` is None) the active block stands for it. With `Canvas.part` a block of the grid is decoded
in parts, each of which is the active block in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllm_sampler.core.values import Canvas


def start(canvas: Canvas) -> Tensor:
    """`[B]` first column of the grid's block that the active block lies in."""
    return canvas.start if canvas.grid is None else line(canvas, canvas.start, canvas.grid)


def line(canvas: Canvas, column: Tensor, length: int) -> Tensor:
    """`[B]` the last line of a grid of `length` up to each `column [B]` of an answer."""
    return column - (column if canvas.origin is None else column - canvas.origin) % length


def end(canvas: Canvas) -> Tensor:
    """`[B]` end of the grid's block that the active block lies in."""
    return canvas.stop if canvas.grid is None else torch.minimum(start(canvas) + canvas.grid, canvas.end)


def inside(canvas: Canvas) -> Tensor:
    """`[B, L+1] bool` columns of the grid's block that the active block lies in."""
    column = canvas.columns()
    return (column >= start(canvas)[:, None]) & (column < end(canvas)[:, None])
