"""The check that no step waits for the device. On a GPU the operations in `FORBIDDEN` would stall the queue."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine

FORBIDDEN = {
    "aten._local_scalar_dense": "item(), bool(tensor) or int(tensor)",
    "aten.is_nonzero": "bool(tensor)",
    "aten.equal": "torch.equal()",
    "aten.nonzero": "nonzero(), or an index of booleans",
    "aten.masked_select": "masked_select()",
    "aten.unique_consecutive": "unique_consecutive()",
    "aten.unique_dim": "unique()",
    "aten._unique": "unique()",
    "aten._unique2": "unique()",
    "aten.repeat_interleave": "repeat_interleave() with a tensor of repeats",  # its size is data
    "aten.bincount": "bincount()",
}
INDEXING = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}


class HostRead(AssertionError):
    """An operation whose result, or the size of it, the host would have to wait for."""


@functools.cache
def _described(operation: Any) -> tuple[bool, str]:
    """Return True if an operation is composed of others, and its name without the overload."""
    return operation.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd), str(operation.overloadpacket)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        composed, name = _described(func)
        if composed:  # in inference mode such an operation comes whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if name in FORBIDDEN:
            raise HostRead(FORBIDDEN[name])
        if name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise HostRead("an index of booleans")
        if name == "aten.lift_fresh" and args[0].dim():  # a copy from pageable memory
            raise HostRead("torch.tensor() of a list")
        if name == "aten._to_copy" and (kwargs or {}).get("device", args[0].device) != args[0].device:
            raise HostRead("a copy to another device")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """A mode that catches reads that make no operation on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy):
            raise HostRead(f"{func.__name__}()")
        # An index given as a list becomes a tensor on the host first.
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in parts):
                raise HostRead("an index that is a list")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostRead` at every operation whose result, or the size of it, the host would have to wait for."""
    with _Methods(), _Operations():
        yield


@contextmanager
def watched_steps() -> Iterator[list[Generation]]:
    """Run every step of the loop under `no_host_reads`. Yields a list that gets one entry per step."""
    step, taken = Engine.step, list[Generation]()

    def under_watch(self: Engine, state: Generation) -> None:
        with no_host_reads():
            step(self, state)
        taken.append(state)

    Engine.step = under_watch
    try:
        yield taken
    finally:
        Engine.step = step
