"""The loop: ask, narrow, plan, forward, read, open, tell, stop, apply, observe, close, advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from dllm_sampler import launches, layout, readout
from dllm_sampler.cache.base import Cache
from dllm_sampler.canvas import Canvas, Query, Readout, Sizes
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.kernels.backend import TORCH, Backend
from dllm_sampler.models.compiled import whole
from dllm_sampler.plugins import Plugins
from dllm_sampler.protocols import Blocks, Carry, Denoiser, ModelSpec, Outlook, Plan, Spent, Stop
from dllm_sampler.trace import Recorder


@dataclass
class State:
    """What one generation carries from step to step."""

    canvas: Canvas
    cache: Cache
    carry: Carry
    bad: Tensor  # [B] first step (from 1) at which the model returned no finite statistics for the row; 0: none
    recorder: Recorder
    ahead: Tensor | None = None  # [B, L+1] see `Scheduler.ahead`
    previous: Tensor | None = None  # [B, W, V] see `Query.previous`
    finished: bool = False
    coming: tuple[Sizes, ...] = ()  # of steps behind the next one, where the schedule fixes them
    begun: float = 0.0  # when the host began the last step, in seconds of its clock


class Engine:
    """Runs steps for one set of plug-ins, on one set of kernels; holds no state of a generation."""

    grain: ClassVar[int] = 1  # canvases whose prompts end at a multiple of it suit it best

    def __init__(
        self,
        denoiser: Denoiser,
        plugins: Plugins,
        poll_every: int,
        kernels: Backend = TORCH,
        entropy: bool = False,
        samples: int = 1,
        compile: bool = False,
    ):
        using = getattr(denoiser, "using", None)  # optional
        self.denoiser = denoiser if using is None or kernels is TORCH else using(kernels)
        self.plugins, self.poll_every, self.kernels = plugins, poll_every, kernels
        self.compile = compile  # the parts of a step beside the model and the readout
        self.entropy, self.samples = entropy, samples  # samples: so many consecutive rows have the same prompt

    def begin(self, canvas: Canvas) -> State:
        """The state before the first step."""
        p, spec = self.plugins, self.denoiser.spec
        cache = p.cache.init(canvas, spec)
        bad = torch.zeros_like(canvas.step)
        recorder = Recorder(canvas, spec.dtype, self.entropy, p.scheduler.revises)
        state = State(canvas, cache, p.scheduler.init(canvas), bad, recorder)
        self._look_ahead(state)
        if self.samples > 1:
            rows = cache.prefill(p.cache, canvas, self.samples, self.denoiser)
            if rows is not None:
                state.canvas = replace(canvas, rows=canvas.rows + rows)
                self.poll(state, 0)
        return state

    def step(self, state: State) -> None:
        """One forward and what it commits. Never reads the device."""
        with launches.by(self.kernels.step):
            self._step(state)

    def _step(self, state: State) -> None:
        p, spec = self.plugins, self.denoiser.spec
        canvas, query, plan = self._part(Engine._ask)(state, spec)
        hidden, spent = self.denoiser(canvas, query, plan)
        needs = p.needs | {"entropy"} if self.entropy else p.needs
        if spec.self_conditioning:
            needs |= {"logits"}
        seen = readout.predict(self.denoiser, hidden, canvas, query, spec, p.guides, needs, p.compat, self.kernels)
        self._part(Engine._tell)(state, spec, canvas, query, seen, spent)

    def _part(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a step, compiled if that was asked for: tensors in and out, sizes that the host knows."""
        return partial(whole(part) if self.compile else part, self)

    def _ask(self, state: State, spec: ModelSpec) -> tuple[Canvas, Query, Plan]:
        """What the model is to compute."""
        p, canvas = self.plugins, state.canvas
        if spec.mask_id is None:
            canvas = canvas.renoised(spec.vocab_size)
        width = max(1, canvas.sizes.masks if p.scheduler.asks == "masks" else canvas.sizes.block)
        query = p.scheduler.ask(canvas, width, state.carry)
        if not (p.scheduler.plain and state.cache.covers):
            query = state.cache.narrow(canvas, query)
        watched = p.stop.positions(canvas)
        if watched is not None:
            query = query.join(canvas, watched & state.cache.answered(canvas), canvas.length)
        if spec.self_conditioning:
            query = replace(query, previous=state.previous)
        return canvas, query, state.cache.plan(canvas, query)

    def _tell(self, state: State, spec: ModelSpec, canvas: Canvas, query: Query, seen: Readout, spent: Spent) -> None:
        """What becomes of the model's answer."""
        p = self.plugins
        opened = p.blocks.open(canvas, query, seen)
        if opened is not None:
            canvas = replace(canvas, stop=torch.where(canvas.age == 0, opened, canvas.stop))
        edit, state.carry = p.scheduler.tell(canvas, query, seen, state.carry)
        forbidden = spec.mask_id if p.compat else None  # a "committed" mask token is still noise
        state.bad, told = canvas.commit(query.positions, edit, state.bad, seen.confidence, forbidden)
        edit = p.stop(canvas, query, seen, told)
        if edit.leave is not told.leave or edit.hold is not told.hold:
            raise UserError(
                f"stop={type(p.stop).__name__} decides when a row leaves its block (leave or hold of the edit), which"
                " is for schedulers and blocks to say: a stop ends rows (finish, end)"
            )
        after = canvas.apply(query.positions, edit)
        state.cache.observe(canvas, query, edit, seen)
        state.recorder.note(canvas, after, query, edit, seen)
        closed = p.blocks.close(canvas, after, edit)
        state.canvas = replace(
            after.advance(closed, p.blocks.lookahead(canvas.length - canvas.origin), edit.finish),
            nfe=canvas.nfe + spent.nfe,
            rows=canvas.rows + spent.rows,
        )
        if seen.logits is not None and spec.self_conditioning:
            state.previous = seen.logits[:, 0].to(spec.dtype)
        self._look_ahead(state)

    def _look_ahead(self, state: State) -> None:
        state.ahead = self.plugins.scheduler.ahead(state.canvas, state.carry)
        if state.ahead is not None:
            state.cache.expect(state.ahead)

    def poll(self, state: State, step: int, last: bool = False) -> None:
        """Between two steps: who is done, and how large the next step must be.

        The device is asked unless the size is known and no row can be done, or nobody wants to know yet (`poll_every`).
        """
        known = self._known(state)
        rests = step % self.poll_every > 0
        if known is None and rests and not self.plugins.cache.stores:
            known = layout.widest(state.canvas, self.plugins.blocks)
        if known is not None and (rests or self.lasting) and not last:
            self._resize(state, known)
        else:
            self._look(state, known)

    @staticmethod
    def _known(state: State) -> Sizes | None:
        """The sizes of the next step, where the schedule fixed them in advance."""
        known, state.coming = (state.coming or (None,))[0], state.coming[1:]
        return known

    @staticmethod
    def _resize(state: State, sizes: Sizes) -> None:
        state.canvas = replace(state.canvas, sizes=replace(sizes, branches=state.canvas.sizes.branches))

    def _look(self, state: State, known: Sizes | None) -> list[int]:
        """Wait for the device and read what was measured; `known` are sizes for when that was the end alone."""
        measured = self.measure(state).tolist()
        found = self._read(state, measured)
        state.coming = found.coming
        # The device has caught up with the host here, so the clock tells how long the step took.
        branches = self.plugins.scheduler.pace(state.canvas, perf_counter() - state.begun)
        sizes = found.sizes or known or state.canvas.sizes
        state.canvas = replace(state.canvas, sizes=replace(sizes, branches=branches))
        if found.bad:
            self.refuse(state)
        return measured

    def _read(self, state: State, measured: list[int]) -> layout.Found:
        p = self.plugins
        found = layout.read(state.canvas, measured, p.scheduler.horizon is not None, not p.compat)
        state.finished = found.finished
        return found

    @property
    def lasting(self) -> bool:
        """Whether no row is done before its block is, as far as plug-ins say; `coming` is empty where they do not."""
        return type(self.plugins.stop).__call__ is Stop.__call__

    def measure(self, state: State) -> Tensor:
        """See `layout.measure`."""
        with launches.by(self.kernels.step):
            return self._part(Engine._measure)(state)

    def _measure(self, state: State) -> Tensor:
        canvas, cache, outlook = state.canvas, state.cache, self._outlook(state)
        limit = canvas.ahead(self.plugins.scheduler.horizon)
        span = None if outlook is None else cache.span(canvas)
        return layout.measure(canvas, state.bad, cache.count(canvas, limit), state.ahead, limit, outlook, span)

    def _outlook(self, state: State) -> Outlook | None:
        """The scheduler's, if no other plug-in has a say in it."""
        p, canvas = self.plugins, state.canvas
        foreign = type(p.blocks).close is not Blocks.close or p.stop.fills or p.scheduler.horizon is not None
        outlook = None if foreign or not state.cache.settles else p.scheduler.outlook(canvas, state.carry)
        if outlook is None or type(p.blocks).open is Blocks.open:
            return outlook
        return outlook._replace(lasts=torch.where(canvas.age == 0, 1, outlook.lasts))  # its size is not known yet

    @staticmethod
    def refuse(state: State) -> None:
        """Say which rows the model returned no finite statistics for.

        Raises:
            NotFiniteError: in any case.
        """
        found = {row: step for row, step in enumerate(state.bad.tolist(), 1) if step}
        raise NotFiniteError(min(found.values()), list(found))

    def run(self, canvas: Canvas, max_steps: int) -> Iterator[State]:
        """Step until every row is done, yielding after each step (the same object)."""
        device = canvas.ids.device
        with torch.no_grad(), _current(device):
            state = self.begin(canvas)
        try:
            for step in range(1, max_steps + 1):
                # not inference_mode: its tensors could not be used by autograd later
                with torch.no_grad(), _current(device):
                    state.begun = perf_counter()
                    self.step(state)
                    try:
                        self.poll(state, step, last=step == max_steps)
                    except NotFiniteError as error:
                        error.state = state
                        raise
                yield state
                if state.finished:
                    return
        finally:
            self.end(state)

    def end(self, state: State) -> None:
        """After the last step, however that came about."""


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton's launches and CUDA graphs go there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
