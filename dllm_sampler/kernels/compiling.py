"""Functions that `torch.compile` compiles, each once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

VERSIONS = 1024


@cache
def compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method, for example of `Layer`, compiled for all objects. Sizes may vary."""
    return torch.compile(part)


@cache
def fullgraph(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a part of a step, compiled for each set of plug-ins and number of rows that a process meets.

    torch gives up after 8 versions of one function, which a sweep over schedulers soon has.
    """
    from torch._dynamo import config  # takes a second to load

    return config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS)(compiled(part))
