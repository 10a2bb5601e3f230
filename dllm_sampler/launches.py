"""The small work of a step, each piece of which a kernel does in one launch: whose kernels, the engine says.

A scheduler calls such functions from inside a step and knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
_kernels: ContextVar[Any] = ContextVar("kernels", default=None)


@contextmanager
def by(kernels: Any) -> Iterator[None]:
    """Within it, what is `launched` is done by the attribute of its name; None: torch does everything."""
    token = _kernels.set(kernels)
    try:
        yield
    finally:
        _kernels.reset(token)


def kernel(name: str) -> Callable[..., Any] | None:
    """The kernel of that name; None: torch's work. A compiler (`torch.compile`) makes kernels of its own."""
    return None if torch.compiler.is_compiling() else getattr(_kernels.get(), name, None)


def launched(plain: Function) -> Function:
    """`plain`, in torch, or the kernel of its name."""

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (kernel(plain.__name__) or plain)(*args, **kwargs)

    return cast(Function, call)


def torchs(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a `launched` function is in torch."""
    return cast(Any, function).__wrapped__
