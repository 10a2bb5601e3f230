"""A step never waits for the device: on a GPU each of these operations would stall the queue."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.contract.cases import SILENT, Case, thinned

FORBIDDEN = {
    "aten._local_scalar_dense",  # item, bool(tensor), int(tensor)
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique_consecutive",
    "aten.unique_dim",
    "aten._unique",
    "aten._unique2",
    "aten.repeat_interleave",  # with a tensor of repeats its size is data
    "aten.bincount",
}
INDEXING = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}


class HostRead(AssertionError):
    pass


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode operations that consist of others come whole
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = str(func.overloadpacket)
        if name in FORBIDDEN:
            raise HostRead(name)
        if name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise HostRead(f"{name} with a mask")
        if name == "aten.lift_fresh" and args[0].dim():  # torch.tensor([...]): a copy from pageable memory
            raise HostRead(f"{name} of a host list")
        if name == "aten._to_copy" and (kwargs or {}).get("device", args[0].device) != args[0].device:
            raise HostRead(f"{name} to another device")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """What leaves no operation behind where the device is the CPU, as in these tests."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy):
            raise HostRead(func.__name__)
        # An index given as a list becomes a tensor on the host first.
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in parts):
                raise HostRead("indexing with a host list")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Refuse every operation whose result, or the size of whose result, the host would have to wait for."""
    with _Methods(), _Operations():
        yield


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Every step of the loop runs under the watch; the list fills with one entry per step."""
    step, taken = Engine.step, []

    def under_watch(engine: Engine, state: Generation) -> None:
        with no_host_reads():
            step(engine, state)
        taken.append(state)

    monkeypatch.setattr(Engine, "step", under_watch)
    return taken


@pytest.mark.parametrize("case", thinned(SILENT))
def test_a_step_reads_nothing(case: Case, watched: list[Generation]) -> None:
    result = case.generate([0, 1, 4], max_steps=5)
    assert len(watched) == int(result.nfe.max())


def test_a_scheduler_that_looks_is_found_out(monkeypatch: pytest.MonkeyPatch, watched: list[Generation]) -> None:
    tell = Threshold.tell
    monkeypatch.setattr(Threshold, "tell", lambda *args: bool(args[1].done.all()) or tell(*args))
    with pytest.raises(HostRead):
        toys.sampler().generate(toys.PROMPTS, max_new_tokens=4)


MASK = torch.tensor([True, False, True])
OFFENDERS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[1]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean write": lambda x: x.index_put((MASK,), x[0]),
    "masked_select": lambda x: x.masked_select(MASK),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(MASK.long()),
    "host constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "list index": lambda x: x[[0, 1]],
    "other device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", OFFENDERS)
def test_the_watch_catches(name: str) -> None:
    with pytest.raises(HostRead), no_host_reads():
        OFFENDERS[name](torch.ones(3))


def test_the_watch_lets_the_rest_pass() -> None:
    x = torch.arange(3.0)
    with no_host_reads():
        y = torch.where(x > 1, x, 0.0).gather(0, x.long()).masked_fill(MASK, -torch.inf)
        y[1] = y[torch.arange(2)].amax()
    assert y.tolist() == [-torch.inf, 0.0, -torch.inf]
