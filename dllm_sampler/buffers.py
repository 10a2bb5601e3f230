"""Where the tensors of a generation that repeats its steps are at home, and what was recorded on them (`graphs.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import layout
from dllm_sampler.cache.slots import Slots
from dllm_sampler.canvas import Sizes
from dllm_sampler.errors import UserError
from dllm_sampler.loop import State
from dllm_sampler.noise import CounterNoise
from dllm_sampler.protocols import ModelSpec
from dllm_sampler.trace import Recorder

PARTS = ("canvas", "cache", "carry", "bad", "recorder", "ahead", "previous", "measured")  # of a state: a step's work
BETWEEN = ("canvas.sizes", "measured")  # what the host sets anew between two steps
# Leaves of a state that are no tensors: a recording holds for their values.
PLAIN = (type(None), bool, int, float, str, Path, torch.dtype, torch.device, Sizes, CounterNoise, ModelSpec)


def address(tensor: Tensor) -> Hashable:
    """Where a tensor's memory begins: another one where it was moved."""
    parts = getattr(tensor.data, "__tensor_flatten__", None)  # sharded or quantised: several tensors
    return tensor.data_ptr() if parts is None else tuple(address(getattr(tensor.data, name)) for name in parts()[0])


@dataclass
class Step:
    """A recorded step: how to repeat it, and the state's objects (not its numbers) after it."""

    replay: Callable[[], None]
    after: dict[str, Any]
    makeup: int  # of the state after it, see `Buffers.settle`

    @property
    def sizes(self) -> Sizes:
        """What it is large enough for."""
        return self.after["canvas"].sizes


class Buffers:
    """The home of every tensor of a state, by its path in the state, and what was recorded on them.

    fits: what the recordings hold for
    """

    def __init__(self, fits: tuple[Hashable, ...]):
        self.fits = fits
        self.homes: dict[Hashable, Any] = {}
        self.storages: set[int] = set()
        self.steps: dict[Hashable, Step | None] = {}  # None: met once, not recorded yet
        self.makeups: dict[Hashable, int] = {}
        self.widest: dict[Hashable, Sizes] = {}  # by `layout.kind`: of the latest step that had the most masks
        self.asked: Tensor | None = None  # [9] what recordings look at to know whether they are wanted
        self.tables: dict[Sizes, Tensor] = {}  # `layout.limits`, on the device: recordings read them too
        self.complete = False  # while a step is recorded: a tensor without a home would live inside the recording

    @property
    def size(self) -> int:
        """Bytes."""
        tensors = (one for home in self.homes.values() for one in _tensors(home))
        return sum(one.numel() * one.element_size() for one in tensors)

    def settle(self, state: State) -> int:
        """Move every tensor of `state` to its home.

        Returns:
            a number for what the state is made of: a recording of the next step depends on it and on the sizes.
        """
        moves: list[tuple[Tensor, Tensor | None]] = []  # None: zeros, of slots that are not made for this
        key: list[Hashable] = []

        def visit(path: str, value: Any) -> Any:
            if not isinstance(value, Tensor | Slots):
                if path not in BETWEEN:
                    key.append((path, value))
                return value
            name = (path, value.columns) if isinstance(value, Slots) else (path, value.shape, value.dtype)
            if path not in BETWEEN:
                key.append(name)
            home = self.homes.get(name)
            if home is None:
                return self._house(name, value)
            if value is not home and isinstance(value, Slots):
                new = [None] * (2 * len(home.keys)) if value.untouched else value.keys + value.values
                moves.extend(zip(home.keys + home.values, new, strict=True))
            elif isinstance(value, Tensor) and value is not home:
                moves.append((home, value))
            return home

        for part in PARTS:
            setattr(state, part, walk(getattr(state, part), visit, part))
        # What one buffer takes over from another is put aside before any is overwritten.
        aside = [new.clone() if new is not None and storage(new) in self.storages else new for _, new in moves]
        alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for (home, _), new in zip(moves, aside, strict=True):
            if new is None:
                home.zero_()
            else:
                alike.setdefault(home.dtype, []).append((home, new))
        for pairs in alike.values():
            homes, new = zip(*pairs, strict=True)
            torch._foreach_copy_(list(homes), list(new))  # pyright: ignore[reportPrivateImportUsage] - one launch
        return self.makeups.setdefault(tuple(key), len(self.makeups))

    def remember(self, sizes: Sizes) -> None:
        """Take note of what a step needed, if none of its kind had more masks: the next one may be like it."""
        kind = layout.kind(sizes)
        if kind not in self.widest or sizes.masks >= self.widest[kind].masks:
            self.widest[kind] = sizes

    def ask(self, numbers: Tensor) -> None:
        """Show `numbers [9]` to the recordings that are sent next.

        A copy: the first one that is wanted measures anew, and those behind it are not asked about the step after.
        """
        if self.asked is None:
            self.asked = numbers.clone()
        else:
            self.asked.copy_(numbers)

    def wanted(self, sizes: Sizes) -> Callable[[], Tensor]:
        """What tells, `[] bool`, whether the numbers that were shown last ask for a step of such sizes."""
        asked = self.asked
        assert asked is not None
        if sizes not in self.tables:
            self.tables[sizes] = torch.tensor(layout.limits(sizes), device=asked.device)
        least, most = self.tables[sizes]
        return lambda: (asked.clamp(least, most) == asked).all()

    def _house(self, name: Hashable, value: Tensor | Slots) -> Tensor | Slots:
        if self.complete:
            raise RuntimeError(f"{name} appeared while its step was recorded")
        # Fields may share memory, so each gets its own; a slot store is nobody else's, and large.
        home = value if isinstance(value, Slots) else value.clone(memory_format=torch.contiguous_format)
        self.storages |= {storage(one) for one in _tensors(home)}
        self.homes[name] = home
        return home


def _tensors(home: Tensor | Slots) -> list[Tensor]:
    return home.keys + home.values if isinstance(home, Slots) else [home]


def storage(tensor: Tensor) -> int:
    """Address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def walk(value: Any, visit: Callable[[str, Any], Any], path: str) -> Any:
    """A copy of a tree of tuples, lists, dicts and objects of ours, in which `visit(path, leaf)` replaces each leaf.

    Leaves are tensors, slot stores and plain values.

    Raises:
        UserError: there is something else, which may keep what no graph knows of.
    """
    if isinstance(value, (Tensor, Slots, *PLAIN)):
        return visit(path, value)
    if isinstance(value, tuple | list):
        items = [walk(item, visit, f"{path}.{i}") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: walk(item, visit, f"{path}.{name}") for name, item in value.items()}
    if not isinstance(value, Recorder) and (not is_dataclass(value) or isinstance(value, type)):
        raise UserError(f"cuda_graph: {path} is a {type(value).__name__}, and nobody knows what it keeps")
    twin = copy.copy(value)
    for name, item in vars(value).items():
        object.__setattr__(twin, name, walk(item, visit, f"{path}.{name}"))
    return twin


def copied(state: State) -> dict[str, Any]:
    """The objects of a state, with the same leaves."""
    return {part: walk(getattr(state, part), lambda _, leaf: leaf, part) for part in PARTS}


def restored(state: State, parts: dict[str, Any]) -> None:
    """Give a state copies of those objects, so that it may change them."""
    for part, value in parts.items():
        setattr(state, part, walk(value, lambda _, leaf: leaf, part))


class Late:
    """Numbers on their way to the host, which does not wait for them until it reads them."""

    def __init__(self, numbers: Tensor):
        on_gpu = numbers.is_cuda
        self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_gpu)
        self.host.copy_(numbers, non_blocking=True)
        self.event = torch.cuda.Event() if on_gpu else None
        if self.event is not None:
            self.event.record()

    def read(self) -> list[int]:
        """Their values."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
