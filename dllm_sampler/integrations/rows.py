"""Rows of a state: an engine recomposes its batch from forward to forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dllm_sampler.engine.tree import walk

State = TypeVar("State")


def taken(state: State, rows: Tensor) -> State:
    """The state of some `rows [n]` alone."""
    return walk(state, lambda _, leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf, "")


def stacked(states: Sequence[State]) -> State:
    """The state of all rows of `states`, which may differ in age.

    Before the first forward of a block a scheduler may hold less of a row, in fewer columns, than behind it; what it
    holds then does not count, so any numbers fill up.
    """
    if len(states) == 1:
        return states[0]
    found: list[dict[str, Any]] = [{} for _ in states]
    for state, leaves in zip(states, found, strict=True):
        walk(state, leaves.__setitem__, "")

    def visit(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaves = [own for one in found if isinstance(own := one.get(path), Tensor)]
        if len(leaves) < len(found):
            return None
        shape = [max(sizes) for sizes in zip(*(one.shape[1:] for one in leaves), strict=True)]
        return torch.cat([one.expand(-1, *shape) for one in leaves])

    return walk(states[0], visit, "")
