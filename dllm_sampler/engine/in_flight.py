"""In-flight batching: a row that ends gives its place to the next prompt.

The state of a generation is tensors with one row per place. Rows that begin are laid out as a small batch of their own,
which is copied into free places; rows that end are copied out. A row does not depend on its neighbours, so no answer
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dllm_sampler.cache.slots import Slots
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.trace import Recorder
from dllm_sampler.core.values import FREE, Canvas, Noise
from dllm_sampler.engine.capture import undisturbed
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.engine.tree import Opaque, walk

SHARED = (bool, int, float, str)  # leaves that hold for all rows
PARTS = ("canvas", "cache", "carry", "bad", "recorder")  # of a state: what a row brings along and takes away
End = Literal["done", "max_steps", "not_finite"]


@dataclass(frozen=True)
class Row:
    """A row to be generated."""

    prompt: Sequence[int]
    new_tokens: int
    seed: int
    bound: int  # most forwards
    tag: Any = None  # the caller's
    form: int = 0  # of its answer, where a guide has a list of forms
    given: list[int] | None = None  # tokens of its answer, `FREE` where one is to be generated; None: all are

    @property
    def free(self) -> int:
        """Tokens to be generated."""
        return self.new_tokens if self.given is None else self.given.count(FREE)


@dataclass(frozen=True)
class Ended:
    """Rows that left together."""

    rows: Sequence[tuple[Row, End]]
    canvas: Canvas  # of these rows alone
    recorder: Recorder


def obstacle(plugins: Plugins, noise: Noise, denoiser: Denoiser) -> str | None:
    """Why rows cannot join a generation that runs; None: they can."""
    if plugins.cache.shared:
        return f"cache={named(plugins.cache)} counts forwards for the batch as a whole"
    if plugins.scheduler.traits.shared:
        return f"scheduler={named(plugins.scheduler)} asks a second model, which keeps a state of its own"
    if type(noise) is not CounterNoise:
        return f"{type(noise).__name__} draws for the batch as a whole"
    if denoiser.spec.encoder:
        return "this model's encoder keeps what it read in an object of its own"
    return None


class Unfit(ValueError):
    """The state of a generation keeps something of which no row can be given to the next prompt."""

    def __init__(self, what: str):
        super().__init__(f"{what}, and not a tensor with one row per prompt")


class Flight:
    """A running generation whose rows come and go.

    Args:
        engine: runs the steps.
        lay_out: makes the canvas of some rows; its number of columns is the same in each call.
        places: rows at a time.
        watch: called after each step; it may end rows (`Canvas.done`), and asks again then.
    """

    def __init__(
        self,
        engine: Engine,
        lay_out: Callable[[Sequence[Row]], Canvas],
        places: int,
        watch: Callable[[Generation], None] | None = None,
    ):
        self.engine, self.lay_out, self.watch = engine, lay_out, watch
        self.rows: list[Row | None] = [None] * places
        self.made = [0] * places  # forwards of each row
        self.state: Generation | None = None
        self.forwards = 0

    @property
    def free(self) -> list[int]:
        """Places without a row."""
        return [place for place, row in enumerate(self.rows) if row is None]

    def admit(self, rows: Sequence[Row], samples: int = 1) -> None:
        """Give each of `rows` a free place; there must be one for each.

        Args:
            samples: each `samples` consecutive rows have the same prompt, which a cache may compute once for them.

        Raises:
            Unfit: the state of a generation keeps something that has no row per place. Rows in flight may go on.
        """
        if not rows:
            return
        places, canvas = self.free[: len(rows)], self.lay_out(rows)
        with undisturbed(canvas.ids.device, self.engine.inference_mode):
            fresh = self.engine.fresh(canvas, samples)
            if self.state is None:
                self.state = self.engine.begin(self._empty(rows[0]))
            at = torch.tensor(places, device=canvas.ids.device)
            try:
                join(self.state, fresh, at)
            except Unfit:
                self.engine.ask(fresh)  # some numbers are set before each forward, and count for that one only
                join(self.state, fresh, at)
            for place, row in zip(places, rows, strict=True):
                self.rows[place], self.made[place] = row, 0
            self.engine.ask(self.state)

    def step(self) -> Ended | None:
        """Make one forward, and take out the rows that ended with it; None: none did."""
        if self.state is None:  # no row came here yet
            self.state = self.engine.begin(self._empty(Row([0], 1, 0, 1)))
        state, engine = self.state, self.engine
        live = {place: row for place, row in enumerate(self.rows) if row is not None}
        self.forwards += 1
        for place in live:
            self.made[place] += 1
        late = [place for place, row in live.items() if self.made[place] >= row.bound]
        engine.advance(state, self.forwards, last=bool(late))
        with undisturbed(state.canvas.ids.device, engine.inference_mode):
            if self.watch is not None:
                self.watch(state)
            ends: dict[int, End] = dict.fromkeys(late, "max_steps")
            ends |= {place: "done" for place in live if state.done[place]}
            ends |= {place: "not_finite" for place in live if place in state.failed}
            return self._leave(state, ends) if ends else None

    def _leave(self, state: Generation, ends: dict[int, End]) -> Ended:
        """Take out the rows at these places."""
        at = torch.tensor([*ends], device=state.canvas.ids.device)
        rows: list[tuple[Row, End]] = [
            (row, end) for place, end in ends.items() if (row := self.rows[place]) is not None
        ]
        left = Ended(rows, taken(state.canvas, at), taken(state.recorder, at))
        for place in ends:
            self.rows[place] = None
        # Rows that did not end by themselves must not go on, nor fail again.
        forced = [place for place, end in ends.items() if end != "done"]
        if forced:
            at = torch.tensor(forced, device=state.canvas.ids.device)
            canvas = state.canvas
            done, masked = canvas.done.index_fill(0, at, True), canvas.masked.index_fill(0, at, False)
            state.canvas = replace(canvas, done=done, masked=masked)
            state.bad = state.bad.index_fill(0, at, 0)
            state.cache = walk(state.cache, partial(_cleaned, rows=at, places=len(self.rows)), "")
            self.engine.ask(state)
        return left

    def masks(self) -> int:
        """How many masks the rows in flight have left, columns that they may still get among them; reads the device."""
        assert self.state is not None
        canvas = self.state.canvas
        left = canvas.masked.sum(1)
        if self.engine.plugins.scheduler.traits.initial is not None:
            left = left + canvas.first + canvas.new_tokens - canvas.end
        return int((left * ~canvas.done).sum())

    def close(self) -> None:
        """No row is in flight any more: whatever the engine keeps for later is free."""
        if self.state is not None:
            self.engine.end(self.state)
        self.state = None

    def _empty(self, row: Row) -> Canvas:
        """A canvas without a live row: places that `row` could have."""
        canvas = self.lay_out([row] * len(self.rows))
        return replace(canvas, done=torch.ones_like(canvas.done), padded=True)


def join(state: Generation, fresh: Generation, places: Tensor) -> None:
    """Copy the rows of `fresh` to the `places [n]` of a running state.

    What a row does not have before its first forward stays as the row before left it: no number of it counts, since the
    row's `step` and `age` are 0.

    Raises:
        Unfit: the state keeps something that has no row per place.
    """
    try:
        new = leaves(fresh)
    except Opaque as error:
        raise Unfit(str(error)) from None

    def visit(path: str, old: Any) -> Any:
        one = new.get(path)
        if isinstance(old, Slots) and isinstance(one, Slots):
            old.take(one, places)
        elif isinstance(old, Tensor) and isinstance(one, Tensor) and one.numel():
            if old.dim() != one.dim() or not old.dim() or (len(old), len(one)) != (len(state.canvas.ids), len(places)):
                raise Unfit(f"{path} is a tensor {[*old.shape]}")
            # A history that is empty at first has one column then, and as many as it needs later.
            return old.index_copy(0, places, one.to(old.dtype).expand(-1, *old.shape[1:]))
        if isinstance(old, SHARED) and type(old) is type(one) and old != one and not path.startswith("canvas"):
            raise Unfit(f"{path} is {old!r} where it was {one!r} before the first forward")
        return old

    joined = {part: walk(getattr(state, part), visit, part) for part in PARTS}
    for part, value in joined.items():
        setattr(state, part, value)


def _cleaned(_: str, leaf: Any, rows: Tensor, places: int) -> Any:
    """A leaf without NaN or infinity in `rows [n]`: even what a mask hides would spoil a sum for the next row."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == places:
        own = leaf[rows]
        leaf = leaf.index_copy(0, rows, own.masked_fill(~own.isfinite(), 0))
    return leaf


def leaves(state: Generation) -> dict[str, Any]:
    """The leaves of a state, by path."""
    found: dict[str, Any] = {}

    def visit(path: str, leaf: Any) -> Any:
        found[path] = leaf
        return leaf

    for part in PARTS:
        walk(getattr(state, part), visit, part)
    return found


def taken(tree: Any, rows: Tensor) -> Any:
    """A canvas or a recorder of some `rows [n]` alone."""
    return walk(tree, lambda _, leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf, "")
