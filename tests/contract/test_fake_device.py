"""Steps on a GPU that is not there: every tensor of a step is on the model's device, and the host reads none of them.

Torch's fake tensors have a device and a shape, but no values: an operation on two devices fails, and so does one whose
result the host would have to wait for. The same steps are made on the CPU before. What the host reads between two steps
comes from there.

Cases whose steps read the device by design (`facts["reads"]`: cache=elastic, scheduler=svdd, guides that veto) are left
out, and those of `UNFAKED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler.cache import dpad
from dllm_sampler.check import toys as networks
from dllm_sampler.check.reads import INDEXING
from dllm_sampler.core import density, packing, select
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.engine import layout
from tests import toys
from tests.contract.cases import CASES, TOKENS, Case
from tests.sampling import sampled

# A torch that was built without CUDA can do little with such tensors, fake as they are.
GPU = "cuda" if torch.backends.cuda.is_built() else "meta"
ROWS = (0, 1, 4)
STEPS = 2
UNFAKED = {  # schedulers, and why
    "apd": "its second model reads the device to find where a draft goes on",
    "learn2pd": "its filter is read from a file, into tensors that are not fake",
}
CHOSEN = [case for case in CASES if not case.facts["reads"] and case.scheduler["name"] not in UNFAKED]


def make_steps(case: Case, device: str, fetch: Callable[[Tensor], list[int]]) -> None:
    """Make the first steps of a generation. `fetch` stands in for the transfer between two steps."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(packing, "_to_host", fetch)
        it = toys.sampler(case.toy, device, backend="torch", **case.plugins)
        plugins, rows = it.plugins, [toys.PROMPTS[row] for row in ROWS]
        canvas = layout.canvas(
            rows, TOKENS, [toys.SEEDS[row] for row in ROWS], it.denoiser.spec, plugins.blocks, it.noise,
            plugins.stop.cuts, forms=[0] * len(rows) if plugins.forms else None,
            changing=plugins.scheduler.traits.find(ChangingLength),
        )  # fmt: skip
        engine = it.engine(plugins)
        state = engine.begin(canvas)
        for _ in range(STEPS):
            with OneDevice() if device == GPU else nullcontext():
                engine.step(state)
            engine.poll(state)
        engine.end(state)


class OneDevice(TorchDispatchMode):
    """Refuses copies from one device to another, and indices on another device than what they index."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        others: list[Any] = []
        if name == "aten._to_copy":
            others = [(kwargs or {}).get("device")]
        elif name == "aten.copy_":
            others = [args[1].device]
        elif name in INDEXING:
            others = [index.device for index in args[1] if index is not None]
        if any(one is not None and one.type != args[0].device.type for one in others):
            raise AssertionError(f"{name} of {args[0].device} and {others}")
        return func(*args, **(kwargs or {}))


def move(network: torch.nn.Module, *to: Any, **more: Any) -> torch.nn.Module:
    """Do as `Module.to` does, which cannot replace fake tensors."""
    for module in network.modules():
        for own in cast(Any, (module._parameters, module._buffers)):
            for name, value in own.items():
                if value is None:
                    continue
                kinds = [
                    one
                    for one in (*to, *more.values())
                    if value.is_floating_point() or not isinstance(one, torch.dtype)
                ]
                new = value.detach().to(*kinds) if kinds else value
                own[name] = torch.nn.Parameter(new, value.requires_grad) if own is module._parameters else new
    return network


@contextmanager
def a_fake_gpu() -> Iterator[None]:
    """Tensors that are made have no values. What is kept for good by device is forgotten before and after."""
    kept = [networks.denoiser, select._numbers, select._view, select._line]
    kept += [one for module in (dpad, density) for one in vars(module).values() if hasattr(one, "cache_clear")]

    def forget() -> None:
        for one in kept:
            one.cache_clear()

    forget()
    try:
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
            patch.setattr(torch.nn.Module, "to", move)
            patch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # no such device has it
            yield
    finally:
        forget()


@pytest.mark.parametrize(
    "case", sampled(CHOSEN, lambda case: [case.facts["static"], case.facts["joins"]], lambda case: case.id)
)
def test_steps_on_a_gpu(case: Case) -> None:
    read: list[list[int]] = []

    def noted(numbers: Tensor) -> list[int]:
        read.append(numbers.tolist())
        return read[-1]

    make_steps(case, "cpu", noted)
    left = iter(read)
    with a_fake_gpu():
        make_steps(case, GPU, lambda _: next(left))
    assert next(left, None) is None
