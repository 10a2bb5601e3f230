"""The passes of `tops.py` over logits, and of `choice.py` over positions, compiled by numba for a CPU.

They run on one thread and keep no gradients. Nothing in them checks bounds: the callers check shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from dllm_sampler.errors import FallbackWarning, first_line, installing
from dllm_sampler.guides.forms.edges import Edges

Made = TypeVar("Made")

MANY = 2**13  # tokens: from here on a drawn step gains three milliseconds by what numba takes five seconds to compile


def applies(edges: Edges) -> bool:
    """Whether numba's passes take the place of torch's operations."""
    return edges.classes.device.type == "cpu" and len(edges.classes) >= MANY and _numba()


def kept(edges: Edges, make: Callable[[Edges], Made]) -> Made:
    """What `make` makes of the edges: once, and as long as they live."""
    if make not in edges.made:
        edges.made[make] = make(edges)
    return edges.made[make]


@cache
def _numba() -> bool:
    """Whether numba is there and takes the numpy that is there; warns where it does not."""
    try:
        import numba  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        why = f"forms take several times as long on a CPU without numba ({first_line(error)})"
        warnings.warn(f"{why}: {installing('constraints')}", FallbackWarning, stacklevel=2)
        return False
    return True
