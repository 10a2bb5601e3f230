"""The state of a generation as a tree: tensors, slot stores and plain values, by their paths."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.cache.slots import Slots
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Sizes

PLAIN = (type(None), bool, int, float, str, Path, torch.dtype, torch.device, Sizes, CounterNoise, ModelSpec)


class UnsupportedLeaf(TypeError):
    """An error: a value of a state cannot be copied row by row."""

    def __init__(self, path: str, value: object):
        kind = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        super().__init__(f"{path} is {kind}")


def map_leaves(value: Any, visit: Callable[[str, Any], Any], path: str) -> Any:
    """Return a copy of a tree in which `visit(path, leaf)` replaces each leaf: a tensor, a slot store or a plain value.

    Branches are tuples, lists, dicts, dataclasses and the recorder.

    Raises:
        UnsupportedLeaf: a value is neither a leaf nor a branch.
    """
    if isinstance(value, (Tensor, Slots, *PLAIN)):
        return visit(path, value)
    if isinstance(value, tuple | list):
        items = [map_leaves(item, visit, f"{path}.{i}") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: map_leaves(item, visit, f"{path}.{name}") for name, item in value.items()}
    if not isinstance(value, Recorder) and (not is_dataclass(value) or isinstance(value, type)):
        raise UnsupportedLeaf(path, value)
    twin = copy.copy(value)
    defaults = {one.name: getattr(value, one.name, None) for one in fields(value)} if is_dataclass(value) else {}
    for name, item in {**defaults, **vars(value)}.items():
        object.__setattr__(twin, name, map_leaves(item, visit, f"{path}.{name}"))
    return twin
