"""In-flight batching: a request that is done gives its lane to the next one.

The state of a generation is tensors with one row per lane. Requests that begin are laid out as a small batch of their
own, which is copied into free lanes. Rows that end are copied out. A row does not depend on its neighbours, so no
answer changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dllm_sampler.cache.slots import Slots
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.spec import BatchState, ChangingLength
from dllm_sampler.core.values import FREE, Canvas, Noise
from dllm_sampler.engine.capture import no_grad_on_device
from dllm_sampler.engine.decide import Generation, Group
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.engine.tree import UnsupportedLeaf, map_leaves
from dllm_sampler.result import MeetingRecord

SHARED = (bool, int, float, str)  # leaves that hold for all rows
# Parts of a state that a row brings along and takes away.
PARTS = ("canvas", "cache", "carry", "failed_at", "recorder", "group")


@dataclass(eq=False)
class Request:
    """One answer to generate: it waits, runs in a lane, and is done.

    Args:
        prompt: token ids. May be empty if tokens of the answer are given.
        max_steps: upper bound on the forwards of the answer.
        form: number of its form, if a guide has a list of forms.
        given: the answer with `FREE` at each position to generate. None if no token is given.
        index: number of the prompt in the call, from 0.
        sample: number of this answer among the answers to the prompt, from 0.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int = 0
    max_steps: int = 1
    form: int = 0
    given: list[int] | None = None
    index: int = 0
    sample: int = 0
    state: Literal["waiting", "running", "done"] = "waiting"
    forwards: int = 0  # made in the running batch
    is_finite: bool = True  # False if the model returned no finite statistics for it
    # Of the rows of its prompt, stored in the first request only.
    meetings: list[MeetingRecord] = field(default_factory=list)

    @property
    def free_tokens(self) -> int:
        """Number of tokens to generate."""
        return self.max_new_tokens if self.given is None else self.given.count(FREE)


@dataclass(frozen=True)
class Ended:
    """Requests that were done together."""

    requests: Sequence[Request]
    canvas: Canvas  # of these rows alone
    recorder: Recorder
    group: Group | None


def obstacle(plugins: Plugins, noise: Noise, denoiser: Denoiser) -> str | None:
    """Return the reason why rows cannot join a running generation, or None if they can."""
    if plugins.cache.shared:
        return f"cache={named(plugins.cache)} has numbers for the batch as a whole"
    if plugins.scheduler.traits.has(BatchState):
        return f"scheduler={named(plugins.scheduler)} has a state for the batch as a whole, not row by row"
    if type(noise) is not CounterNoise:
        return f"{type(noise).__name__} draws for the batch as a whole"
    if denoiser.spec.encoder:
        return "the state of this model's encoder is not stored row by row"
    return None


class CannotJoin(ValueError):
    """An error: the state of a generation has a value that is not a tensor with one row per lane."""

    def __init__(self, what: str):
        super().__init__(f"{what}, and not a tensor with one row per prompt")


class RunningBatch:
    """A running generation whose rows come and go.

    Args:
        engine: the engine that runs the steps.
        lay_out: function that makes the canvas of some requests. Its number of columns is the same in each call.
        lanes: most rows at a time.

    Attributes:
        watch: function called after each step. If it ends rows (`Canvas.done`), it calls `Engine.ask_and_poll`.
    """

    def __init__(self, engine: Engine, lay_out: Callable[[Sequence[Request]], Canvas], lanes: int):
        self.engine, self.lay_out = engine, lay_out
        self.watch: Callable[[Generation], None] | None = None
        self.lanes: list[Request | None] = [None] * lanes
        self.state: Generation | None = None

    @property
    def free(self) -> list[int]:
        """Lanes without a running request."""
        return [lane for lane, one in enumerate(self.lanes) if one is None or one.state == "done"]

    def admit(self, requests: Sequence[Request], samples: int = 1) -> None:
        """Give each request a free lane. There must be one for each.

        Args:
            samples: each `samples` consecutive requests have the same prompt, which a cache may compute once for them.

        Raises:
            CannotJoin: the state of a generation has something other than one row per lane. Running rows can continue.
        """
        assert all(request.state == "waiting" for request in requests)
        lanes, canvas = self.free[: len(requests)], self.lay_out(requests)
        with no_grad_on_device(canvas.ids.device, self.engine.inference_mode):
            fresh = self.engine.initial_state(canvas, samples)
            if self.state is None:
                self.state = self.engine.begin(self._empty(requests[0]))
            at = torch.tensor(lanes, device=canvas.ids.device)
            try:
                join(self.state, fresh, at)
            except CannotJoin:
                # The scheduler's or the cache's `ask` sets numbers that running rows have and fresh ones lack.
                self.engine.ask_and_poll(fresh)
                join(self.state, fresh, at)
            for lane, request in zip(lanes, requests, strict=True):
                self.lanes[lane], request.state, request.forwards = request, "running", 0
            self.engine.ask_and_poll(self.state)

    def step(self) -> Ended | None:
        """Make one forward, and take out the rows that ended with it. Returns None if no row ended."""
        if self.state is None:  # no row came here yet
            self.state = self.engine.begin(self._empty(Request([0], 1)))
        state, engine = self.state, self.engine
        running = {lane: one for lane, one in enumerate(self.lanes) if one is not None and one.state == "running"}
        for request in running.values():
            request.forwards += 1
        late = {lane for lane, request in running.items() if request.forwards >= request.max_steps}
        engine.advance(state)
        with no_grad_on_device(state.canvas.ids.device, engine.inference_mode):
            if self.watch is not None:
                self.watch(state)
            ended = {lane: one for lane, one in running.items() if lane in late | {*state.failed} or state.done[lane]}
            return self._leave(state, ended) if ended else None

    def _leave(self, state: Generation, ended: dict[int, Request]) -> Ended:
        """Return copies of the rows of these lanes, and mark their requests as done."""
        device = state.canvas.ids.device
        for lane, request in ended.items():
            request.state, request.is_finite = "done", lane not in state.failed
        at = torch.tensor([*ended], device=device)
        left = Ended([*ended.values()], taken(state.canvas, at), taken(state.recorder, at), taken(state.group, at))
        # Rows that did not end by themselves must not go on, nor fail again.
        forced = [lane for lane in ended if lane in state.failed or not state.done[lane]]
        if forced:
            at = torch.tensor(forced, device=device)
            canvas = state.canvas
            done, masked = canvas.done.index_fill(0, at, True), canvas.masked.index_fill(0, at, False)
            state.canvas = replace(canvas, done=done, masked=masked)
            state.failed_at = state.failed_at.index_fill(0, at, 0)
            state.cache = map_leaves(state.cache, partial(_cleaned, rows=at, lanes=len(self.lanes)), "")
            self.engine.ask_and_poll(state)
        return left

    def masks_left(self) -> int:
        """Return the number of masks in running rows and of columns that may still be added. Reads the device."""
        assert self.state is not None
        canvas = self.state.canvas
        left = canvas.masked.sum(1)
        if self.engine.plugins.scheduler.traits.has(ChangingLength):
            left = left + canvas.layout.answer_end - canvas.end
        return int((left * ~canvas.done).sum())

    def close(self) -> None:
        """End the generation, so that the engine frees its buffers. No row may be running."""
        if self.state is not None:
            self.engine.end(self.state)
        self.state = None

    def _empty(self, request: Request) -> Canvas:
        """Return a canvas of finished rows, laid out as `request` in every lane."""
        canvas = self.lay_out([request] * len(self.lanes))
        return replace(canvas, done=torch.ones_like(canvas.done)).with_layout(padded=True)


def join(state: Generation, fresh: Generation, lanes: Tensor) -> None:
    """Copy the rows of `fresh` to the `lanes [n]` of a running state.

    A tensor that is empty in `fresh`, such as a history, stays as the lane's last row left it. Its numbers have no
    effect, since the new row's `step` and `age` are 0.

    Raises:
        CannotJoin: the state has something other than one row per lane.
    """
    try:
        new = {path: leaf for part in PARTS for path, leaf in leaves(getattr(fresh, part), part).items()}
    except UnsupportedLeaf as error:
        raise CannotJoin(str(error)) from None

    def visit(path: str, old: Any) -> Any:
        one = new.get(path)
        if isinstance(old, Slots) and isinstance(one, Slots):
            old.take(one, lanes)
        elif isinstance(old, Tensor) and isinstance(one, Tensor) and one.numel():
            if old.dim() != one.dim() or not old.dim() or (len(old), len(one)) != (len(state.canvas.ids), len(lanes)):
                raise CannotJoin(f"{path} is a tensor {[*old.shape]}")
            # A history that is empty at first has one column then, and as many as it needs later.
            return old.index_copy(0, lanes, one.to(old.dtype).expand(-1, *old.shape[1:]))
        if isinstance(old, SHARED) and type(old) is type(one) and old != one and not path.startswith("canvas"):
            raise CannotJoin(f"{path} is {old!r} where it was {one!r} before the first forward")
        return old

    joined = {part: map_leaves(getattr(state, part), visit, part) for part in PARTS}
    for part, value in joined.items():
        setattr(state, part, value)


def _cleaned(_: str, leaf: Any, rows: Tensor, lanes: int) -> Any:
    """Return a leaf with 0 for NaN and infinity in `rows [n]`. Even masked ones would spoil sums of a later row."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == lanes:
        own = leaf[rows]
        leaf = leaf.index_copy(0, rows, own.masked_fill(~own.isfinite(), 0))
    return leaf


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a part of a state, by path."""
    found: dict[str, Any] = {}

    def visit(path: str, leaf: Any) -> Any:
        found[path] = leaf
        return leaf

    map_leaves(tree, visit, path)
    return found


def taken(tree: Any, rows: Tensor) -> Any:
    """Return a copy of a part of a state that has only the rows `rows [n]`."""
    return map_leaves(tree, lambda _, leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf, "")
