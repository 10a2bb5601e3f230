"""Answers of which some tokens are given: which columns are left to write, and where the next of them is.

Given tokens stand on the canvas from the start, frozen like the prompt. No step commits them, so that what a schedule
counts are the other columns of an answer. Where nothing is given (`Canvas.given` is None) all columns are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dllm_sampler.core.values import Canvas

FREE = -1  # in place of a token: the position is to be generated


def room(canvas: Canvas, until: Tensor) -> Tensor:
    """`[B]` columns of each answer before `until [B]` that are not given."""
    if canvas.given is None:
        return until - canvas.first
    return (~canvas.frozen & (canvas.columns() < until[:, None])).sum(1)


def total(canvas: Canvas) -> Tensor:
    """`[B]` columns of each answer that are not given, before a stop cuts it."""
    return canvas.new_tokens if canvas.given is None else room(canvas, canvas.first + canvas.new_tokens)


def size(canvas: Canvas) -> Tensor:
    """`[B]` columns of the active block that are not given."""
    if canvas.given is None:
        return canvas.stop - canvas.start
    return (~canvas.frozen & canvas.in_block()).sum(1)


def progress(canvas: Canvas) -> Tensor:
    """`[B]` share of each answer's columns, those that are not given, that is committed."""
    return 1 - canvas.masked.sum(1) / room(canvas, canvas.end)


def shown(canvas: Canvas, column: Tensor) -> Tensor:
    """`[B]` first hidden column when all from `column [B]` on should be hidden: given tokens stay visible."""
    return column if canvas.given is None else torch.maximum(column, canvas.given)


def following(canvas: Canvas, column: Tensor) -> Tensor:
    """`[B]` where the next block begins when one ends at `column [B]`: at the first column from there on that is not
    given, or at `end`. Noise is not asked for: a drafting scheduler may have written into the block already."""
    if canvas.given is None:
        return column
    columns = canvas.columns()
    free = ~canvas.frozen & (columns >= column[:, None])
    return torch.where(free, columns, canvas.end[:, None]).amin(1)
