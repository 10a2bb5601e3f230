"""Cases of `kernels.py`: each kernel on the data of one call, made as often as the clock asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from clocks import size
from torch import Tensor

from dllm_sampler.kernels.backend import Backend, LayerKernels
from dllm_sampler.kernels.sampling import Sampling


class Work(NamedTuple):
    """One call, on data of its own."""

    run: Callable[[Backend], Any]
    moved: int  # bytes that cannot be avoided: inputs once, outputs once


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    make: Callable[[], Work]


SAMPLINGS = ("greedy", "draw")


def sampling(what: str, rows: int, vocab: int, device: torch.device) -> Sampling:
    """The best token of each row, or a draw at a temperature; the last token is the mask."""
    if what == "greedy":
        return Sampling(vocab - 1)
    return Sampling(vocab - 1, 0.7, keys=torch.randint(2**62, (rows,), device=device))


def readouts(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> Iterator[Case]:
    """A greedy choice and a draw at a temperature."""
    for what in SAMPLINGS:

        def make(what: str = what) -> Work:
            logits = torch.randn(rows, vocab, device=device, dtype=dtype) * 4
            how = sampling(what, rows, vocab, device)
            return Work(lambda it: it.readout(logits, how), size(logits))

        yield Case(f"readout {rows} x {vocab} {what}", make)


def heads(device: torch.device, dtype: torch.dtype, rows: int, vocab: int, width: int) -> Iterator[Case]:
    """The head of a model for a window's masks, and a library's product whose logits are stored and read."""
    for what in SAMPLINGS:
        for name in ("head", "head stored"):

            def make(what: str = what, stored: bool = name == "head stored") -> Work:
                hidden = torch.randn(rows, width, device=device, dtype=dtype)
                weight = torch.randn(vocab, width, device=device, dtype=dtype) / width**0.5
                how = sampling(what, rows, vocab, device)

                def fused(it: Backend) -> Any:
                    return it.head(hidden, weight, how)

                def apart(it: Backend) -> Any:
                    return it.readout(torch.nn.functional.linear(hidden, weight), how)

                return Work(apart if stored else fused, size(weight, hidden))

            yield Case(f"{name} {rows} x {width} x {vocab} {what}", make)


@dataclass(frozen=True)
class Layer:
    """The parts of a layer for the last `window` columns of rows of `slots`; the feed-forward is thrice the stream."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    window: int
    slots: int
    heads: int
    kv_heads: int
    head: int

    @property
    def width(self) -> int:
        return self.heads * self.head

    @property
    def entries(self) -> int:
        return self.rows * self.window

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots."""
        keys, values = (self.normal(self.rows, self.slots + 1, self.kv_heads, self.head) for _ in range(2))
        return keys, values

    def columns(self) -> Tensor:
        return torch.arange(self.slots - self.window, self.slots, device=self.device).repeat(self.rows)

    def attention(self, half: bool = False, fresh: bool = False, grid: int | None = None) -> Work:
        """half: of the slots are visible; fresh: the window's keys are not stored yet."""
        q, slots, at = self.normal(self.entries, self.heads, self.head), self.stored(), self.columns()
        bounds = torch.arange(self.rows + 1, device=self.device) * self.window
        own, given = (None, None), {}
        if half:
            given["end"] = torch.full((self.rows,), self.slots // 2, device=self.device)
        if fresh:
            own = tuple(self.normal(self.entries, self.kv_heads, self.head) for _ in range(2))
            hidden = torch.zeros(self.rows, self.slots + 1, dtype=torch.bool, device=self.device)
            hidden[:, self.slots - self.window : self.slots] = True
            given["unread"] = hidden
        if grid:
            given["until"] = (at // grid + 1) * grid
        return self._work(
            lambda its: its.attention(q, *own, slots, bounds, at, longest=self.window, **given),
            size(q, q) + size(*slots) // (1 + half),
        )

    def norm(self) -> Work:
        hidden, delta = (self.normal(self.entries, self.width) for _ in range(2))
        weight = self.normal(self.width)
        return self._work(lambda its: its.norm(hidden, weight, 1e-5, delta), 4 * size(hidden))

    def qkv_rope(self) -> Work:
        fused = self.normal(self.entries, (self.heads + 2 * self.kv_heads) * self.head)
        angles = self.normal(self.entries, self.head // 2, dtype=torch.float32)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        slots = self.stored()
        places = torch.arange(self.entries, device=self.device) // self.window * (self.slots + 1) + self.columns()
        return self._work(
            lambda its: its.qkv_rope(
                fused, cos, sin, self.heads, self.kv_heads, slots=slots, places=places, fresh=False
            ),
            size(fused, fused, cos, sin),
        )

    def swiglu(self) -> Work:
        gate = self.normal(self.entries, 6 * self.width)
        return self._work(lambda its: its.swiglu(gate), size(gate) * 3 // 2)

    def linear(self) -> Work:
        hidden = self.normal(self.entries, self.width)
        shape = 6 * self.width, self.width
        numbers = torch.randint(-127, 128, shape, device=self.device, dtype=torch.int8)
        scale = torch.rand(len(numbers), device=self.device)
        moved = size(hidden, numbers, scale) + self.entries * len(scale) * hidden.element_size()
        return self._work(lambda its: its.linear(hidden, numbers, scale), moved)

    @staticmethod
    def _work(run: Callable[[LayerKernels], Any], moved: int) -> Work:
        plain = references()
        return Work(lambda it: run(it.layer or plain), moved)


def references() -> LayerKernels:
    """Return torch references of the kernels of a layer."""
    from dllm_sampler.kernels import linear, norm, reference, rope, swiglu

    return LayerKernels(
        reference.attention,
        linear.linear_reference,
        norm.norm_reference,
        rope.qkv_rope_reference,
        swiglu.swiglu_reference,
    )


def layers(it: Layer) -> Iterator[Case]:
    """Each part of a layer."""
    if importlib.util.find_spec("triton") is None:  # their modules import it, and hold the references too
        return
    from dllm_sampler.kernels.linear import MANY

    parts: dict[str, Callable[[], Work]] = {
        "attention": it.attention,
        "attention half visible": lambda: it.attention(half=True),
        "attention fresh keys": lambda: it.attention(fresh=True),
        "attention blocks of 32": lambda: it.attention(grid=32),
        "norm": it.norm,
        "qkv_rope": it.qkv_rope,
        "swiglu": it.swiglu,
    }
    if it.entries <= MANY:  # with more the kernel is its reference
        parts["linear int8"] = it.linear
    for name, make in parts.items():
        shape = f"{it.rows} x {it.window} of {it.slots}, heads {it.heads}/{it.kv_heads} of {it.head}"
        yield Case(f"{name} {shape}", make)


def cases(device: torch.device, smoke: bool) -> Iterator[Case]:
    """On a GPU the sizes of LLaDA-8B and Dream-7B, on a CPU and for a smoke run small ones."""
    if smoke or device.type == "cpu":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        rows, vocab = (4, 1000) if smoke else (32, 16384)
        yield from readouts(device, dtype, rows, vocab)
        yield from heads(device, dtype, rows, vocab, 64 if smoke else 512)
        yield from layers(Layer(device, dtype, 2, 8, 64 if smoke else 512, 4, 2, 64))
        return
    for rows in (1, 32, 1024, 2048):
        yield from readouts(device, torch.bfloat16, rows, 126464)
    for rows in (16, 64, 256, 1024, 2048):
        yield from heads(device, torch.bfloat16, rows, 126464, 4096)
        yield from heads(device, torch.bfloat16, rows, 152064, 3584)
    for rows, window in ((1, 8), (1, 32), (1, 256), (1, 1024), (16, 32), (64, 32), (1, 2048)):
        slots = max(1024, window)
        yield from layers(Layer(device, torch.bfloat16, rows, window, slots, 32, 32, 128))
        yield from layers(Layer(device, torch.bfloat16, rows, window, slots, 28, 4, 128))
