"""Static buffers: one address for every tensor of a generation, and the steps that were recorded on them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.cache.slots import Slots
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.tree import map_leaves

# parts of a state that a step changes
PARTS = (
    "canvas", "cache", "carry", "failed_at", "recorder", "group", "wanted", "counts", "previous", "most_candidates",
)  # fmt: skip
WANTED = PARTS.index("wanted")
SIZES = "wanted.sizes"  # what the host sets between two steps


def address(tensor: Tensor) -> Hashable:
    """Return the address of a tensor's memory, or of its parts. It changes when the tensor is moved."""
    parts = getattr(tensor.data, "__tensor_flatten__", None)  # sharded or quantised: several tensors
    return tensor.data_ptr() if parts is None else tuple(address(getattr(tensor.data, name)) for name in parts()[0])


@dataclass
class Step:
    """A recorded step.

    replay: function that repeats the step
    after: the state's objects (not its numbers) after the step, in the order of `PARTS`
    key: number of the state key after the step
    generation: number of the last generation that replayed the step (`Buffers.generation`)
    """

    replay: Callable[[], None]
    after: tuple[Any, ...]
    key: int
    generation: int = 0


class Buffers:
    """A buffer for every tensor of a state, by its path in the state, and the steps that were recorded on them.

    Args:
        fits: canvas shape, stream, GPU and facts of the model. The recordings are valid for these only.
    """

    def __init__(self, fits: tuple[Hashable, ...]):
        self.fits = fits
        self.generation = 0  # number of generations that had the buffers before
        self.held: dict[Hashable, Any] = {}
        self.storages: set[int] = set()
        self.steps: dict[Hashable, Step | None] = {}  # None for a step that ran once and is not recorded yet
        self.keys: dict[Hashable, int] = {}  # state keys by number, which is hashed in each step
        self.complete = False  # True while a step is recorded, when a new buffer would live inside the recording

    @property
    def size(self) -> int:
        """Size of all buffers in bytes."""
        tensors = (one for buffer in self.held.values() for one in _tensors(buffer))
        return sum(one.numel() * one.element_size() for one in tensors)

    def make_room(self, most: int) -> bool:
        """Return True if there is room for a new recording, which may delete an old one.

        If there are `most`, the oldest one that this generation has not replayed is deleted. If it has replayed all,
        the result is False.
        """
        made = [(key, step.generation) for key, step in self.steps.items() if step is not None]
        old = next((key for key, generation in made if generation < self.generation), None)
        if len(made) >= most and old is not None:
            del self.steps[old]
        return len(made) < most or old is not None

    def copy_in(self, state: Generation) -> int:
        """Copy every tensor of `state` into its buffer, which takes its place in the state.

        Returns:
            the number of the state key: its plain values and its tensors' shapes, on which a recording of the next step
            depends.
        """
        moves: list[tuple[Tensor, Tensor | None]] = []  # None: zeros, of slots that are still unwritten
        key: list[Hashable] = []

        def visit(path: str, value: Any) -> Any:
            if not isinstance(value, Tensor | Slots):
                if path != SIZES:
                    key.append((path, value))
                return value
            name = (path, value.columns) if isinstance(value, Slots) else (path, value.shape, value.dtype)
            key.append(name)
            buffer = self.held.get(name)
            if buffer is None:
                return self._make(name, value)
            if value is not buffer and isinstance(value, Slots):
                new = [None] * (2 * len(buffer.keys)) if value.untouched else value.keys + value.values
                moves.extend(zip(buffer.keys + buffer.values, new, strict=True))
            elif isinstance(value, Tensor) and value is not buffer:
                moves.append((buffer, value))
            return buffer

        for part in PARTS:
            setattr(state, part, map_leaves(getattr(state, part), visit, part))
        # What one buffer takes over from another is put aside before any is overwritten.
        aside = [new.clone() if new is not None and storage(new) in self.storages else new for _, new in moves]
        alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for (buffer, _), new in zip(moves, aside, strict=True):
            if new is None:
                buffer.zero_()
            else:
                alike.setdefault(buffer.dtype, []).append((buffer, new))
        for pairs in alike.values():
            buffers, new = zip(*pairs, strict=True)
            torch._foreach_copy_(list(buffers), list(new))  # pyright: ignore[reportPrivateImportUsage] - one launch
        return self.keys.setdefault(tuple(key), len(self.keys))

    def _make(self, name: Hashable, value: Tensor | Slots) -> Tensor | Slots:
        if self.complete:
            raise RuntimeError(f"the step added a tensor to the state while it was recorded: {name}")
        # Fields may share memory, so each gets its own; a slot store is shared with nothing, and large.
        buffer = value if isinstance(value, Slots) else value.clone(memory_format=torch.contiguous_format)
        self.storages |= {storage(one) for one in _tensors(buffer)}
        self.held[name] = buffer
        return buffer


def _tensors(buffer: Tensor | Slots) -> list[Tensor]:
    return buffer.keys + buffer.values if isinstance(buffer, Slots) else [buffer]


def storage(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def objects(state: Generation) -> tuple[Any, ...]:
    """Return the objects of a state, in the order of `PARTS`."""
    return tuple(getattr(state, part) for part in PARTS)


def copies(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of the objects of a state, with the same leaves."""
    return tuple(map_leaves(value, lambda _, leaf: leaf, part) for part, value in zip(PARTS, parts, strict=True))


def restore(state: Generation, parts: tuple[Any, ...]) -> None:
    """Set the objects of a state to `parts`, in the order of `PARTS`."""
    for part, value in zip(PARTS, parts, strict=True):
        setattr(state, part, value)
