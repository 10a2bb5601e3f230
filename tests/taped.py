"""A tape, which stands in for a CUDA graph: operations are written down once and repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler import Sampler
from dllm_sampler.cache.slots import Slots
from dllm_sampler.engine.buffers import Step
from dllm_sampler.engine.capture import Record
from dllm_sampler.engine.graphs import InPlace, StaticEngine
from tests import toys


class Tape(TorchDispatchMode):
    """Writes down operations; `play` repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        now: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(current, value))
            return now.get(id(value), value)

        def replace(old: Any, new: Any) -> None:
            if isinstance(old, Tensor):
                now[id(old)] = new
            elif isinstance(old, (list, tuple)):
                for one, other in zip(old, new, strict=True):
                    replace(one, other)

        for func, args, kwargs, out in self.operations:
            replace(out, func(*map(current, args), **{name: current(one) for name, one in kwargs.items()}))


def taped(run: Callable[[], None]) -> Callable[[], None]:
    tape = Tape()
    with tape:
        run()
    return tape.play


class Taped(StaticEngine):
    """Takes back what a recording did, since recording a graph does nothing either."""

    replays = 0

    def _recorded(self, state: InPlace, record: Record) -> Step | None:
        held = state.buffers.held.values()
        tensors = [one for it in held for one in (it.keys + it.values if isinstance(it, Slots) else [it])]
        before = [tensor.clone() for tensor in tensors]
        step = super()._recorded(state, record)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        if step is not None:
            step.replay = lambda play=step.replay: self._play(play)
        return step

    def _play(self, play: Callable[[], None]) -> None:
        self.replays += 1
        play()


def on_tape(it: Sampler, record: Record = taped) -> Taped:
    """The engine on which the sampler steps from now on."""
    engine = Taped(it.denoiser, it.plugins, record=record)
    cast(Any, it).engine = lambda plugins, samples=1: engine
    return engine


def pair(kind: str = "gqa", **plugins: Any) -> tuple[Sampler, Sampler, Taped]:
    """A sampler, the same on a tape, and its engine."""
    plain, it = (toys.sampler(kind, **plugins) for _ in range(2))
    return plain, it, on_tape(it)
