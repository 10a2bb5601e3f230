"""Cached calls of `torch.compile`: one per function and process. A function may have several compiled versions."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

VERSIONS = 1024


@cache
def compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a method, for example of `Layer`, for all objects and sizes."""
    return torch.compile(part)


@cache
def fullgraph(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a part of a step. It has a version for each set of plug-ins and number of rows.

    By default torch gives up after 8 versions of a function, and a sweep over schedulers soon needs more.
    """
    from torch._dynamo import config  # takes a second to load

    return config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS)(compiled(part))
