"""The loop: ask, pack, forward, read, open, tell, stop, apply, observe, close, advance; then one look by the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from dllm_sampler.core import packing
from dllm_sampler.core.packing import Request
from dllm_sampler.core.protocols import Cache, Carry, Denoiser, Foresees, Paced, Planner, Prefills
from dllm_sampler.core.trace import Recorder
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Spent
from dllm_sampler.engine import readout
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.kernels.backend import TORCH, Backend
from dllm_sampler.models.compiled import whole


@dataclass
class State:
    """What one generation carries from step to step."""

    canvas: Canvas
    cache: Cache
    carry: Carry
    bad: Tensor  # [B] first step (from 1) at which the model returned no finite statistics for the row; 0: none
    recorder: Recorder
    wanted: Request  # of the next step
    measured: Tensor  # see `packing.measure`
    previous: Tensor | None = None  # [B, W, V] see `Query.previous`
    finished: bool = False
    begun: float = 0.0  # when the host began the last step, in seconds of its clock
    branches: int | None = None  # `Canvas.branches` when the next step was asked for


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
        self.compile = compile  # the parts of a step besides the model and the readout
        self.samples = samples  # this many consecutive rows have the same prompt
        needs = plugins.needs | {"entropy"} if entropy else plugins.needs
        self.needs = needs | {"logits"} if self.denoiser.spec.self_conditioning else needs
        self.entropy = entropy
        # Looked up once: `isinstance` of a protocol takes as long as ten small operations.
        self.paced, self.foresees = isinstance(plugins.scheduler, Paced), isinstance(plugins.cache, Foresees)

    def run(self, canvas: Canvas, max_steps: int) -> Iterator[State]:
        """Step until every row is done, yielding after each step (the same object)."""
        # Not inference_mode: its tensors could not be used by autograd later.
        with torch.no_grad(), _current(canvas.ids.device):
            state = self.begin(canvas)
        try:
            for step in range(1, max_steps + 1):
                with torch.no_grad(), _current(canvas.ids.device):
                    state.begun = perf_counter()
                    self.step(state)
                    self.poll(state, step, last=step == max_steps)
                yield state
                if state.finished:
                    return
        finally:
            self.end(state)

    def begin(self, canvas: Canvas) -> State:
        """The state before the first step."""
        p, spec = self.plugins, self.denoiser.spec
        cache, bad = p.cache.init(canvas, spec), torch.zeros_like(canvas.step)
        if self.samples > 1 and isinstance(cache, Prefills):
            rows = cache.prefill(p.cache, canvas, self.samples, self.denoiser)
            canvas = canvas if rows is None else replace(canvas, computed=canvas.computed + rows)
        recorder = Recorder(canvas, spec.dtype, self.entropy, p.scheduler.traits.revises)
        nothing: Any = None
        state = State(canvas, cache, p.scheduler.init(canvas), bad, recorder, nothing, nothing)
        self.ask(state)
        self.poll(state, 0)
        return state

    def step(self, state: State) -> None:
        """One forward, what it commits, and what the next one is asked for. Never reads the device."""
        p, canvas = self.plugins, state.canvas
        wanted = packing.trimmed(state.wanted, canvas.sizes)
        query, plan = wanted.query, state.cache.plan(canvas, wanted)
        hidden, spent = self.denoiser(canvas, query, plan)
        rule = (state.cache.spec, p.guides, self.needs, p.compat)
        seen = readout.predict(self.denoiser, hidden, canvas, plan.answers, *rule, self.kernels)
        self._part(Engine._tell)(state, canvas, query, seen, spent)
        self._part(Engine.ask)(state)

    def poll(self, state: State, step: int, last: bool = False) -> None:
        """Read what the last step left: the one time in a step that the host waits for the device.

        With `poll_every` above 1, and no cache whose steps differ in size, it waits only every `poll_every` steps; the
        others are as large as they may have to be.

        Raises:
            NotFiniteError: the model returned no finite statistics for some row.
        """
        if step % self.poll_every and not (last or self.plugins.cache.stores):
            state.canvas = replace(state.canvas, sizes=packing.largest(state.canvas, state.wanted))
            state.branches = state.canvas.branches
            return
        found = packing.read(state.measured.tolist())
        state.finished = found.finished
        before, state.canvas = state.canvas, replace(state.canvas, sizes=found.sizes)
        if self.paced and (step or before.branches is None):
            # The next step has been asked for already: what the scheduler says now holds for the one after it.
            made = replace(before if step else state.canvas, branches=state.branches)
            branches = cast(Paced, self.plugins.scheduler).pace(made, perf_counter() - state.begun)
            state.canvas = replace(state.canvas, branches=branches)
        state.branches = before.branches
        if found.bad:
            self.refuse(state)

    @staticmethod
    def refuse(state: State) -> None:
        """Say which rows the model returned no finite statistics for.

        Raises:
            NotFiniteError: in any case.
        """
        found = {row: step for row, step in enumerate(state.bad.tolist(), 1) if step}
        error = NotFiniteError(min(found.values()), list(found))
        error.state = state
        raise error

    def end(self, state: State) -> None:
        """After the last step, however that came about."""

    def _part(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a step, compiled if that was asked for: tensors in and out, sizes that the host knows."""
        return partial(whole(part) if self.compile else part, self)

    def ask(self, state: State) -> None:
        """What the model is to compute next, and how large that is."""
        p, spec, cache = self.plugins, state.cache.spec, state.cache
        if spec.mask_id is None:
            state.canvas = state.canvas.renoised(spec.vocab_size)
        canvas = state.canvas
        query = p.scheduler.ask(canvas, state.carry)
        if self.foresees:
            ahead = cast(Planner, p.scheduler).ahead(canvas, state.carry)  # such a cache refuses all others
            assert ahead is not None
            cast(Foresees, cache).expect(ahead, query.positions.shape[1])
        chosen = cache.computes(canvas)
        computed = packing.computable(canvas, query, chosen)
        answered = packing.answerable(canvas, computed, spec)
        if chosen is not None or spec.encoder:
            query = cache.narrow(canvas, query, answered)
        watched = p.stop.positions(canvas)
        if watched is not None:
            query = query.join(canvas, watched & answered, canvas.length)
        if state.previous is not None:
            query = replace(query, previous=state.previous)
        state.wanted = Request.of(query, computed, answered)
        state.measured = packing.measure(canvas, state.wanted, state.bad)

    def _tell(self, state: State, canvas: Canvas, query: Query, seen: Readout, spent: Spent) -> None:
        """What becomes of the model's answer."""
        p, spec = self.plugins, state.cache.spec
        opened = p.blocks.open(canvas, query, seen)
        if opened is not None:
            canvas = replace(canvas, stop=torch.where(canvas.age == 0, opened, canvas.stop))
        edit, state.carry = p.scheduler.tell(canvas, query, seen, state.carry)
        forbidden = spec.mask_id if p.compat else None  # a "committed" mask token is still noise
        state.bad, told = canvas.reject_nonfinite(query.positions, edit, state.bad, seen.confidence, forbidden)
        edit, after = self._stop(canvas, query, seen, told)
        state.cache.observe(canvas, query, edit, seen)
        state.recorder.note(canvas, after, query, edit, seen)
        closed = p.blocks.close(canvas, after, edit)
        state.canvas = after.advance(closed, canvas.width, edit.finish, spent)
        if seen.logits is not None and spec.self_conditioning:
            state.previous = seen.logits[:, 0].to(spec.dtype)

    def _stop(self, canvas: Canvas, query: Query, seen: Readout, edit: Edit) -> tuple[Edit, Canvas]:
        """The edit as the stop policy leaves it, and the canvas after it."""
        stop, after = self.plugins.stop, canvas.apply(query.positions, edit)
        stopped = stop(canvas, after, query, seen, edit)
        if stopped.close_block is not edit.close_block or stopped.keep_block is not edit.keep_block:
            raise UserError(
                f"stop={type(stop).__name__} decides when a row leaves its block (edit.keep_block, edit.close_block),"
                " which is for schedulers and blocks to say: a stop ends rows (finish, end)"
            )
        writes = ("ids", "commit", "remask", "end")
        if any(getattr(stopped, name) is not getattr(edit, name) for name in writes):
            after = canvas.apply(query.positions, stopped)
        return stopped, after


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton's launches and CUDA graphs go there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
