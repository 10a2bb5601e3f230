"""Recorded steps: a generation's tensors keep their addresses, so that a CUDA graph can repeat a step.

A graph is a recording of launches on fixed addresses. So the state lives in static buffers, a step's outcome is copied
into them, and what the host decides in a step (sizes, the flags that a cache keeps as plain numbers) is the key under
which the step is recorded. The first step of a key runs eagerly, which also warms up what a recording may not do:
compile, allocate workspaces. The second is recorded; from then on it is replayed. Sizes are rounded up to eight from
one power of two to the next. Steps of more than `MOST` entries are bound by arithmetic and always run eagerly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, replace

import torch
from torch import nn

from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.values import Canvas, Noise, Sizes
from dllm_sampler.engine import capture
from dllm_sampler.engine.buffers import Buffers, Step, address, copied, restored
from dllm_sampler.engine.capture import Record
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine, inference_mode
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.engine.tree import Opaque
from dllm_sampler.errors import UserError, first_line
from dllm_sampler.kernels.backend import TORCH, Backend, warn
from dllm_sampler.models.fused import hooked
from dllm_sampler.models.moe import Experts, waits

KEPT = 8  # shapes of canvas whose recordings are kept
ROOM = 2**31  # bytes of buffers, beyond which the oldest go before new ones are made
MOST = 512  # entries of a pack up to which steps are recorded


def check(choice: object) -> None:
    """Refuse what is no choice of `Sampler(cuda_graph=...)`.

    Raises:
        UserError: what it may be.
    """
    if not isinstance(choice, bool) and choice != "auto":
        raise UserError(f"cuda_graph must be true, false or auto, not {choice!r}")


def obstacle(plugins: Plugins, noise: Noise, denoiser: Denoiser) -> str | None:
    """Why steps of these cannot be recorded; None: they can."""
    spec = denoiser.spec
    if spec.device.type != "cuda":
        return f"graphs are CUDA's, and the model is on {spec.device.type}"
    if plugins.cache.syncs:
        return f"cache={named(plugins.cache)} reads the device inside a step"
    if type(noise) is not CounterNoise:
        return f"{type(noise).__name__} draws on the host"
    if spec.encoder:
        return "this model's encoder keeps what it read in an object of its own"
    vetoing = next((guide for guide in plugins.guides if guide.vetoes), None)
    if vetoing is not None:
        return f"guide={named(vetoing)} reads the device inside a step"
    traits, scheduler = plugins.scheduler.traits, f"scheduler={named(plugins.scheduler)}"
    if traits.shared:
        return f"{scheduler} asks a second model, which keeps a state of its own"
    if not traits.static:
        return f"{scheduler} reads the device inside a step"
    return _unfit(nn.ModuleList(networks(denoiser)), spec.device)


def _unfit(networks: nn.ModuleList, device: torch.device) -> str | None:
    """What a forward does other than launch kernels on one GPU; None: nothing."""
    weights = list(networks.parameters())
    places = sorted({str(weight.device) for weight in weights})
    if len(places) > 1 or places == ["meta"]:
        return f"the model's weights lie on {' and '.join(places)}"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return "the model's weights are sharded, and gathered in each forward"
    for name, module in networks.named_modules():
        if hooked(module):
            name = name.partition(".")[2] or type(module).__name__
            return f"a hook or another forward is at the model's {name}: no replay calls it"
        if isinstance(module, Experts) and waits(module, device):
            return "torch's grouped product waits for the GPU, except in bfloat16 on an H100 or a B200"
    return None


def networks(denoiser: object) -> Iterator[nn.Module]:
    """The networks of a denoiser and of those inside it, without the wrapper of `torch.compile`."""
    for value in getattr(denoiser, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            yield getattr(value, "_orig_mod", value)
        elif hasattr(value, "spec"):
            yield from networks(value)


def model(denoiser: object) -> tuple[Hashable, ...]:
    """What a recording takes for granted of the model: where its weights lie, its mode, autocast."""
    found: list[Hashable] = []
    for network in networks(denoiser):
        kind = next((weight.device.type for weight in network.parameters()), "cpu")
        found += [network.training, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)]
        found += [address(weight) for weight in (*network.parameters(), *network.buffers())]
    return tuple(found)


@dataclass
class InPlace(Generation):
    """A state and its buffers."""

    buffers: Buffers = field(kw_only=True)


class StaticEngine(Engine):
    """An engine that records and replays its steps.

    A recording is good for one shape of canvas. So that prompts of nearly the same length share it, they are padded to
    a multiple of `multiple`, and the buffers of several shapes are kept.

    Args:
        record: what makes a step repeatable, `capture.cuda`; None: every step runs eagerly.
        must: refuse a plug-in whose state no recording knows of; else its generations run eagerly, with a warning.
    """

    multiple = 32

    def __init__(
        self,
        denoiser: Denoiser,
        plugins: Plugins,
        poll_every: int,
        kernels: Backend = TORCH,
        record: Record | None = None,
        must: bool = True,
        entropy: bool = False,
        samples: int = 1,
        compile: bool = False,
    ):
        super().__init__(denoiser, plugins, poll_every, kernels, entropy, samples, compile)
        self.record, self.must = record, must
        self.free: list[Buffers] = []  # of generations that are over, the latest last: one like it finds its recordings

    def begin(self, canvas: Canvas) -> Generation:
        """See `Engine.begin`. Generations that overlap in time have buffers of their own."""
        buffers = self._found(canvas)
        plain = super().begin(canvas)
        state = InPlace(**{one.name: getattr(plain, one.name) for one in fields(plain)}, buffers=buffers)
        try:
            buffers.copy_in(state)
        except Opaque as error:
            why = f"{error}, and a recording cannot know what it keeps"
            if self.must:
                raise UserError(f"cuda_graph: {why}") from None
            warn(f"steps run without CUDA graphs: {why}")
            return plain
        return state

    def step(self, state: Generation) -> None:
        """See `Engine.step`."""
        if not isinstance(state, InPlace) or self.record is None or state.canvas.sizes.computed > MOST:
            super().step(state)
            return
        state.canvas = replace(state.canvas, sizes=rounded(state.canvas))
        steps = state.buffers.steps
        key = state.buffers.copy_in(state), state.canvas.sizes
        if key not in steps:
            steps[key] = None
            super().step(state)
            state.buffers.copy_in(state)  # what it leaves has buffers, also where no other step follows
            return
        step = steps[key] = steps[key] or self._recorded(state, self.record)
        if step is None:
            super().step(state)
            return
        step.replay()
        restored(state, step.after)

    def end(self, state: Generation) -> None:
        """See `Engine.end`. A later generation may have the buffers."""
        if isinstance(state, InPlace):
            # The latest stay whatever their size: most generations are followed by one like them.
            self._make_room(KEPT - 1, max(0, ROOM - state.buffers.size))
            self.free.append(state.buffers)

    def _recorded(self, state: InPlace, record: Record) -> Step | None:
        """The next step, recorded; None: it cannot be, and no step will be from now on."""
        before = copied(state)
        state.buffers.complete = True

        def run() -> None:
            Engine.step(self, state)
            state.buffers.copy_in(state)

        try:
            return Step(record(run), copied(state))
        except Exception as error:  # what the step itself raises, it raises again without a recording
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and isinstance(cause.__context__, Exception):
                # ending a recording that failed fails too
                cause = cause.__context__
            self.record = None
            warn(f"a step cannot be recorded as a CUDA graph and runs without one: {first_line(cause)}")
            return None
        finally:
            state.buffers.complete = False
            restored(state, before)

    def _found(self, canvas: Canvas) -> Buffers:
        """Free buffers for such a canvas and the weights where they are, or new ones, for which there is room then."""
        fits = canvas.ids.shape, canvas.ids.device, model(self.denoiser)
        self.free = [one for one in self.free if one.fits[1:] == fits[1:]]
        for at in reversed(range(len(self.free))):
            if self.free[at].fits == fits:
                return self.free.pop(at)
        self._make_room(KEPT - 1, ROOM)
        return Buffers(fits)

    def _make_room(self, most: int, room: int) -> None:
        """Let the oldest free buffers go until there are at most `most`, and no more than `room` bytes in all."""
        sizes = [one.size for one in self.free]
        while len(self.free) > most or sum(sizes) > room:
            del self.free[0], sizes[0]


def rounded(canvas: Canvas) -> Sizes:
    """Sizes that are large enough and of which there are few: a recording is good for one."""
    sizes, most = canvas.sizes, canvas.length

    def up(size: int) -> int:  # eight from one power of two to the next: at most an eighth too large
        step = (1 << max(3, size.bit_length() - 1)) // 8
        return -(-size // step) * step

    return replace(
        sizes,
        queries=min(most, 1 << (sizes.queries - 1).bit_length()),
        block=canvas.width,
        computed=up(sizes.computed),
        answers=up(sizes.answers),
        longest=most if sizes.whole else min(max(most, sizes.longest), up(sizes.longest)),
        opens=True,
        rows=None,
        stretch=None if sizes.stretch is None else 1 << (sizes.stretch - 1).bit_length(),
    )


def engine(
    denoiser: Denoiser,
    plugins: Plugins,
    poll_every: int,
    kernels: Backend,
    noise: Noise,
    choice: bool | str,
    options: tuple[bool, int, bool],
    last: StaticEngine | None,
) -> Engine:
    """The engine of `Sampler(cuda_graph=...)`.

    Args:
        options: entropy, samples and compile, as `Engine` has them.
        last: the one that recorded steps before, which is taken again where it can be.

    Raises:
        UserError: steps are to be recorded, and cannot be.
    """
    why = None if choice is False else obstacle(plugins, noise, denoiser)
    if why is not None and choice is True:
        raise UserError(f"cuda_graph=true cannot be: {why}")
    if why is not None or choice is False:
        return Engine(denoiser, plugins, poll_every, kernels, *options)
    same = plugins, kernels, options[1], inference_mode(denoiser)
    if last is not None and (last.plugins, last.kernels, last.samples, last.inference_mode) == same:
        return last
    return StaticEngine(denoiser, plugins, poll_every, kernels, capture.cuda, choice is True, *options)
