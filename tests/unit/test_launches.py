"""Launches as a GPU would see them, without one: the JIT makes an integer that is 1 a constant of the kernel.

The interpreter does not, and configurations compiled ahead of time have only the constants that they name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter specialises nothing", allow_module_level=True)

import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ir, make_backend
from triton.runtime.jit import JITFunction

from dllm_sampler.kernels import (
    attention,
    flash,
    head,
    linear,
    norm,
    partial,
    readout,
    rope,
    swiglu,
)  # fmt: skip
from dllm_sampler.kernels.sampling import Sampling

pytestmark = pytest.mark.slow
TARGET = GPUTarget("cuda", 90, 32)
PLACE = "no GPU"  # what the JIT files these kernels under, apart from any other device's
KERNELS = (
    flash.attention_kernel, flash.combine_kernel, head.head_kernel,
    linear.linear_kernel, norm.norm_kernel, partial.combine_kernel, readout.readout_kernel,
    rope.qkv_kernel, swiglu.swiglu_kernel,
)  # fmt: skip


def translated(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
    """Triton's compiler up to its first intermediate form, where a kernel that makes no sense fails."""
    context = ir.context()
    backend: Any = make_backend(target)
    parsed = backend.parse_options({**(options or {}), **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    given = {
        "target": target, "options": parsed, "codegen_fns": functions, "module_map": modules, "context": context
    }  # fmt: skip
    source.make_ir(*(given[name] for name in signature(source.make_ir).parameters))  # Triton 3.4 takes no target
    return SimpleNamespace()


def specialised(source: Any, warps: int, stages: int) -> Hashable:
    """What a binary depends on: types, constants, multiples of 16, and how it is compiled."""
    constants = {name: str(value) for name, value in source.constants.items()}
    facts = source.signature, constants, {at: str(value) for at, value in source.attrs.items() if value}
    return source.fn.fn.__name__, *(tuple(sorted(one.items())) for one in facts), warps, stages


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, drive: Callable[[object], None]) -> Iterator[set[str]]:
    """The names of the kernels that were launched on an H100 which is not there."""
    names: set[str] = set()
    run = JITFunction.run

    def warm(self: Any, *given: Any, **options: Any) -> Any:
        names.add(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
        return run(self, *given, **(options | {"warmup": True}))

    here = SimpleNamespace(
        get_current_device=lambda: PLACE, get_current_stream=lambda _=None: 0, get_current_target=lambda: TARGET
    )
    drive(here)
    monkeypatch.setattr(JITFunction, "run", warm)
    monkeypatch.setattr(triton.compiler, "compile", translated)
    yield names
    for kernel in KERNELS:
        kernel.device_caches.pop(PLACE, None)


def readouts(rows: int) -> None:
    keys = torch.arange(rows)
    for vocab in (45, 4099):  # a part and two
        logits = torch.randn(rows, vocab, dtype=torch.bfloat16)
        readout.readout(logits)
        readout.readout(logits, Sampling(1, 0.7, True, keys, keys))
        hidden, weight = torch.randn(rows, 64), torch.randn(vocab, 64)
        head.head(hidden, weight)
        head.head(hidden, weight, Sampling(1, 0.7, False, keys, keys))


def heads(rows: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        hidden, weight = torch.randn(rows, 64, dtype=dtype), torch.randn(4099, 64, dtype=dtype)
        keys = torch.arange(rows)
        head.head(hidden, weight)
        head.head(hidden, weight, Sampling(1, 0.7, False, keys, keys))


def attentions(rows: int) -> None:
    """A pack of `rows` entries in one row and in two; one is one line of one head in the kernel that adds parts up."""
    q, columns = torch.randn(rows, 1, 16), torch.arange(rows)
    for batch in (1, 2):
        slots = torch.randn(batch, rows + 2, 1, 16), torch.randn(batch, rows + 2, 1, 16)
        bounds = torch.arange(batch + 1).clamp(max=1) * rows
        hidden = torch.zeros(batch, rows + 2, dtype=torch.bool)
        end, until = torch.ones(batch, dtype=torch.long), columns + 1
        for splits in (1, 2):
            attention.packed_attention(q, None, None, slots, bounds, columns, end=end, splits=splits)
            attention.packed_attention(q, q, q, None, bounds, columns, until=until, segment=columns, splits=splits)
            attention.packed_attention(
                q, q, q, slots, bounds, columns, until=until, segment=columns.int(), unread=hidden, splits=splits
            )


def linears(rows: int) -> None:
    for outputs, inputs in ((1, 1), (8500, 64), (16, 4096)):
        weight, scale = torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(outputs)
        for dtype in (torch.float32, torch.bfloat16):
            linear.linear(torch.randn(rows, inputs, dtype=dtype), weight, scale)
            linear.linear(torch.randn(rows, inputs, dtype=dtype), weight, scale, scale.to(dtype))


def layers(rows: int) -> None:
    for width in (1, 64):
        x = torch.randn(rows, width)
        norm.norm(x, torch.ones(width), 1e-5)
        norm.norm(x, torch.ones(width), 1e-5, x)
        swiglu.swiglu(x, x)
    fused, turn = torch.randn(rows, 3 * 16), torch.randn(rows, 16)
    rope.qkv_rope(fused, turn, turn, 1, 1)
    slots = torch.zeros(1, 5, 1, 16), torch.zeros(1, 5, 1, 16)
    rope.qkv_rope(fused, turn, turn, 1, 1, slots=slots, places=torch.arange(rows), fresh=False)


@pytest.mark.parametrize(
    ("launch", "kernels"),
    [
        (readouts, {"readout.readout_kernel", "head.head_kernel", "partial.combine_kernel"}),
        (attentions, {"flash.attention_kernel", "flash.combine_kernel"}),
        (linears, {"linear.linear_kernel"}),
        (layers, {"norm.norm_kernel", "swiglu.swiglu_kernel", "rope.qkv_kernel"}),
    ],
)
def test_a_launch_of_one_row_compiles(launch: Callable[[int], None], kernels: set[str], launched: set[str]) -> None:
    launch(1)
    assert launched == kernels


def llada(rows: int, batch: int, fresh: bool = False) -> None:
    """A layer and the head of LLaDA-8B, for `rows` entries of `batch` rows of 1,024 positions; nothing is computed."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x, delta, weight = empty(rows, 4096), empty(rows, 4096), empty(4096)
    norm.norm(x, weight, 1e-5)
    norm.norm(x, weight, 1e-5, delta)
    swiglu.swiglu(empty(rows, 24576))
    slots = empty(batch, 1025, 32, 128), empty(batch, 1025, 32, 128)
    turn, places = empty(rows, 128, dtype=torch.float32), empty(rows, dtype=torch.int64)
    rope.qkv_rope(empty(rows, 12288), turn, turn, 32, 32, slots=slots, places=places, fresh=False)
    q, bounds = empty(rows, 32, 128), empty(batch + 1, dtype=torch.int64)
    end = empty(batch, dtype=torch.int64)
    attention.packed_attention(q, None, None, slots, bounds, places, end=end, longest=rows // batch)
    if rows <= 64:
        keys = empty(rows, dtype=torch.int64)
        for sampling in (Sampling(126463), Sampling(126463, 1.0, True, keys)):
            head.head(x, empty(126464, 4096), sampling)
        for outputs, inputs in ((12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
            numbers, scale = empty(outputs, inputs, dtype=torch.int8), empty(outputs, dtype=torch.float32)
            linear.linear(empty(rows, inputs), numbers, scale)
    else:
        for sampling in (Sampling(126463), Sampling(126463, 1.0, True, empty(rows, dtype=torch.int64))):
            readout.readout(empty(rows, 126464), sampling)


@pytest.mark.parametrize(("rows", "batch"), [(16, 1), (32, 1), (64, 1), (64, 2), (512, 16), (2048, 64)])
def test_what_is_launched_is_what_is_compiled_ahead_of_time(
    rows: int, batch: int, launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    report = import_module("ahead_of_time")
    known = {specialised(report.source(it), it.warps, it.stages) for it in report.configurations()}
    found: list[Hashable] = []

    def met(source: Any, options: Any = None, **_: Any) -> Any:
        found.append(specialised(source, options["num_warps"], options["num_stages"]))
        return SimpleNamespace()

    monkeypatch.setattr(triton.compiler, "compile", met)
    monkeypatch.setattr(attention, "_processors", lambda _: 132)
    llada(rows, batch)
    assert len(found) > 8 and [one for one in found if one not in known] == []


def test_a_launch_of_the_head_with_many_rows_compiles(launched: set[str]) -> None:
    heads(65)  # the product is a library's
    assert launched == {"readout.readout_kernel", "partial.combine_kernel"}
