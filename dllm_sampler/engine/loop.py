"""The loop: plan, run the forward, read out, decide, and ask for the next forward. Then the host reads once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from dllm_sampler.core import packing
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Denoiser, Paced, Prefills
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.spec import ChangingLength, ModelSpec
from dllm_sampler.core.values import AttentionMeans, Canvas, Readout
from dllm_sampler.engine import decide, faults, readout
from dllm_sampler.engine.capture import no_grad_on_device
from dllm_sampler.engine.decide import Generation, Group
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.kernels.backend import TORCH, Backend
from dllm_sampler.kernels.compiling import fullgraph


class Engine:
    """The loop of steps for one set of plug-ins on one set of kernels. It has no state of a generation.

    Args:
        entropy: record the entropy of each committed prediction.
        samples: this many consecutive rows have the same prompt.
        compile: use `torch.compile` for the parts of a step that commit predictions and ask for the next forward.
    """

    multiple: ClassVar[int] = 1  # the number of columns of a canvas is a multiple of it

    def __init__(
        self,
        denoiser: Denoiser,
        plugins: Plugins,
        kernels: Backend = TORCH,
        *,
        entropy: bool = False,
        samples: int = 1,
        compile: bool = False,
    ):
        using = getattr(denoiser, "using", None)  # optional
        self.denoiser = denoiser if using is None or kernels is TORCH else using(kernels)
        self.inference_mode = inference_mode(denoiser)
        self.plugins, self.kernels = plugins, kernels
        self.entropy, self.samples, self.compile = entropy, samples, compile
        needs = plugins.needs | {"entropy"} if entropy else plugins.needs
        needs = needs | {"logits"} if self.denoiser.spec.self_conditioning else needs
        self.needs = needs - {"attention"}  # the layers measure it, not the readout
        self.watches = plugins.watched_layers

    def run(self, canvas: Canvas, max_steps: int) -> Iterator[Generation]:
        """Make steps until every row is done, at most `max_steps`. Yields the state after each (the same object).

        Raises:
            NotFiniteError: the model returned no finite statistics for some row.
        """
        with no_grad_on_device(canvas.ids.device, self.inference_mode):
            state = self.begin(canvas)
        try:
            for _ in range(max_steps):
                self.advance(state)
                if state.failed:
                    raise _not_finite(state)
                yield state
                if state.finished:
                    return
        finally:
            self.end(state)

    def begin(self, canvas: Canvas) -> Generation:
        """Create the initial state and the request for the first step."""
        state = self.initial_state(canvas, self.samples)
        self.ask_and_poll(state)
        return state

    def initial_state(self, canvas: Canvas, samples: int = 1) -> Generation:
        """Create the state before the first request.

        Args:
            samples: each `samples` consecutive rows have the same prompt.
        """
        p = self.plugins
        spec = self.denoiser.spec.with_ends(p.context.spec.eos_ids)
        cache = p.cache.init(canvas, spec)
        traits = p.scheduler.traits
        recorder = Recorder(canvas, spec.dtype, self.entropy, traits.revises, traits.has(ChangingLength))
        if samples > 1 and isinstance(cache, Prefills):
            computed = cache.prefill(p.cache, canvas, samples, self.denoiser)
            if computed is not None:
                recorder.computed += computed
        zero, group = torch.zeros_like(canvas.step), None
        if p.particles.count > 1:
            mark = canvas.start if p.particles.every is None else canvas.step
            group = Group(mark, torch.zeros_like(canvas.done), zero, zero, p.particles.init(canvas))
        return Generation(canvas, cache, p.scheduler.init(canvas), zero, recorder, group)

    def advance(self, state: Generation) -> None:
        """Make a step, and read its counts: the only time in a step that the host waits for the device."""
        made, begun = state.wanted, perf_counter()
        assert made is not None
        with no_grad_on_device(state.canvas.ids.device, self.inference_mode):
            self.step(state)
            self.poll(state)
            if self.plugins.paced:
                # The next step has been asked for already. The new limit holds for the one after it.
                state.most_candidates = cast(Paced, self.plugins.scheduler).pace(made, perf_counter() - begun)

    def step(self, state: Generation) -> None:
        """Make one forward, commit its predictions, and ask for the next one.

        The engine itself does not read the device here.
        """
        p, canvas = self.plugins, state.canvas
        assert state.wanted is not None
        wanted, most = state.wanted, state.wanted.sizes.queries  # the columns after these are padding in every row
        wanted = replace(wanted, query=wanted.query.trim(most), answered=wanted.answered[..., :most])
        plan = state.cache.plan(canvas, wanted)
        if self.watches:
            plan = replace(plan, means=AttentionMeans(self.watches))
        hidden, spent = self.denoiser(canvas, wanted.query, plan)
        hidden = state.cache.restore(hidden, plan)
        seen = self.read(hidden, canvas, plan.head_rows, state.cache.spec)
        if plan.means is not None:
            if plan.means.attention is None:
                raise UserError(
                    "plugin-result",
                    f"{type(self.denoiser).__name__} does not measure attention, which a plug-in needs. Fill in"
                    " `plan.means` in its forward, or use plug-ins without attention.",
                )
            seen = replace(seen, attention=plan.means.attention, attended=plan.means.attended)
        try:
            self.maybe_compiled(decide.tell)(p, state, wanted.query, seen, spent)
        except Exception as error:
            faults.check_needs(error, seen)
            raise
        self.maybe_compiled(decide.ask)(p, state)

    def read(self, hidden: Tensor, canvas: Canvas, head_rows: HeadRows, spec: ModelSpec) -> Readout:
        """Return the statistics `[B, K, Q]` of hidden states `[R, D]`."""
        p = self.plugins
        rule = readout.Rule(spec, p.guides, self.needs, p.compat, p.judge == "best")
        return readout.predict(self.denoiser, hidden, canvas, head_rows, rule, self.kernels)

    def ask_and_poll(self, state: Generation) -> None:
        """Ask for the next forward and read its sizes: before the first step, or after the canvas was changed."""
        self.maybe_compiled(decide.ask)(self.plugins, state)
        self.poll(state)
        if self.plugins.paced and state.most_candidates is None:
            assert state.wanted is not None
            state.most_candidates = cast(Paced, self.plugins.scheduler).pace(state.wanted, 0.0)

    def poll(self, state: Generation) -> None:
        """Read on the host how large the next forward is, which rows are done and which have failed."""
        assert state.wanted is not None and state.counts is not None
        found = packing.read_counts(state.counts, len(state.canvas.ids))
        state.wanted = replace(state.wanted, sizes=found.sizes)
        state.done, state.failed = found.done, found.failed

    def end(self, state: Generation) -> None:
        """Clean up after a generation, also after an error."""

    def maybe_compiled(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """Return a part of the step, compiled if the engine compiles."""
        return fullgraph(part) if self.compile else part


def inference_mode(denoiser: Denoiser) -> bool:
    """Return True if steps may run in `torch.inference_mode`: an optional property of the denoiser."""
    return getattr(denoiser, "inference_mode", False) is True


def _not_finite(state: Generation) -> NotFiniteError:
    error = NotFiniteError(min(state.failed.values()), [row + 1 for row in state.failed])
    error.state = state
    return error
