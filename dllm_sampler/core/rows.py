"""The choice between two states of a batch, row by row."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.values import Canvas, Edit, Readout

_PER_ROW = ("ids", "masked", "start", "stop", "age", "step", "done")  # what a step changes of a canvas


def where_rows(which: Tensor, new: Any, old: Any, empty: int) -> Any:
    """Return a tree of tensors, canvases, readouts and edits: `new` in the rows `which [B]`, `old` in the others.

    Everything else in the tree is that of `new`. The two sides may come from queries of different widths. Then the
    narrower side is padded: a named tuple's `positions` with `empty`, the column of the empty slot, and other values
    with their last column.
    """
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        new, old = _widened(new, old.shape), _widened(old, new.shape)
        return torch.where(which.view(-1, *[1] * (new.dim() - 1)), new, old)
    names: Sequence[str] = ()
    if isinstance(new, Canvas):
        names = _PER_ROW
    elif isinstance(new, Readout | Edit) and isinstance(old, type(new)):
        names = [one.name for one in fields(new) if isinstance(getattr(new, one.name), Tensor)]
    if names:
        picked = {one: where_rows(which, getattr(new, one), getattr(old, one), empty) for one in names}
        return replace(cast(Any, new), **picked)
    if isinstance(new, tuple) and isinstance(old, tuple):
        names = getattr(new, "_fields", [""] * len(new))
        parts = []
        for name, one, other in zip(names, new, old, strict=True):
            if name == "positions":
                width = max(one.shape[1], other.shape[1])
                one, other = _padded(one, width, empty), _padded(other, width, empty)
            parts.append(where_rows(which, one, other, empty))
        return type(new)(*parts) if any(names) else tuple(parts)
    return new


def _padded(positions: Tensor, width: int, empty: int) -> Tensor:
    return pad(positions, (0, width - positions.shape[1]), value=empty)


def _widened(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `values`, each dimension after the first at least as long as in `shape`. Sorted columns stay sorted."""
    for axis in range(1, values.dim()):
        missing = shape[axis] - values.shape[axis]
        if missing > 0:
            one = [*values.shape[:axis], 1, *values.shape[axis + 1 :]]
            last = values.narrow(axis, -1, 1) if values.shape[axis] else values.new_zeros(one)
            values = torch.cat([values, *[last] * missing], axis)
    return values
