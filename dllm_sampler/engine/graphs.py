"""Recorded steps: a generation's tensors keep their addresses, so that a CUDA graph can repeat a step.

A graph is a recording of launches on fixed addresses. So the state lives in static buffers, a step's outcome is copied
into them, and what the host decides in a step (sizes, the flags that a cache keeps as plain numbers) is the key under
which the step is recorded. The first step of a key runs eagerly, which also warms up what a recording may not do:
compile, allocate workspaces. The second is recorded; from then on it is replayed. Sizes are rounded up, so that few
steps are recorded (`rounded`). Steps of more than `MOST` entries are bound by arithmetic and always run eagerly.

The host must not keep a GPU waiting between a look at one step and the replay of the next. So the key of a state is
known before the look: a recording has the key of the state that it leaves, and what an eager step leaves is copied into
the buffers at once. It holds as long as nobody gives the state other objects (`InPlace.held`).
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import BatchState
from dllm_sampler.core.values import Canvas, Noise, Sizes
from dllm_sampler.engine.buffers import PARTS, WANTED, Buffers, Step, address, copies, objects, restore
from dllm_sampler.engine.capture import GraphRecorder, Record
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine, inference_mode
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.engine.tree import UnsupportedLeaf
from dllm_sampler.errors import UserError, first_line
from dllm_sampler.kernels.backend import TORCH, Backend, has_hooks, warn

KEPT = 8  # shapes of canvas whose recordings are kept
ROOM = 2**31  # bytes of buffers, beyond which the oldest go before new ones are made
LEAST = 16  # rows: a matrix unit multiplies as many at once
MOST = 512  # entries of a pack up to which steps are recorded
RECORDED = 64  # steps for one shape of canvas. A batch of 16 whose rows come and go needs some 25
ENGINES = 4  # settings of a sampler whose recordings are kept, such as the block lengths that calls take turns with
COUNTED = "If a plug-in counts steps in a Python number, each step needs its own recording: count in a tensor instead."


def obstacle(plugins: Plugins, noise: Noise, denoiser: Denoiser) -> str | None:
    """Return the reason why steps with these plug-ins, noise and model cannot be recorded, or None if they can."""
    spec = denoiser.spec
    if spec.device.type != "cuda":
        return f"the model is on {spec.device.type}, not on a GPU"
    if plugins.cache.syncs:
        return f"cache={named(plugins.cache)} reads the device inside a step"
    if plugins.cache.shared:
        return f"cache={named(plugins.cache)} counts forwards, and each would need a recording of its own"
    if type(noise) is not CounterNoise:
        return f"{type(noise).__name__} draws on the host"
    if plugins.particles.meets and plugins.particles.count > 1:
        return f"particles={named(plugins.particles)} keeps the state of rows that wait"
    if spec.encoder:
        return "the state of this model's encoder cannot be recorded"
    vetoing = next((guide for guide in plugins.guides if guide.vetoes), None)
    if vetoing is not None:
        return f"guide={named(vetoing)} reads the device inside a step"
    traits, scheduler = plugins.scheduler.traits, f"scheduler={named(plugins.scheduler)}"
    if traits.has(BatchState):
        return f"{scheduler} has a state for the batch as a whole, which cannot be recorded"
    if not traits.graph_safe:
        return f"{scheduler} reads the device inside a step"
    return _unfit(nn.ModuleList(networks(denoiser)), spec.device)


def _unfit(networks: nn.ModuleList, device: torch.device) -> str | None:
    """Return the reason why a recording cannot repeat the networks' forward, or None if it can."""
    weights = list(networks.parameters())
    if not weights:
        return "the model is a function, not a module, and a recording cannot know when its weights move"
    places = sorted({str(weight.device) for weight in weights})
    if len(places) > 1 or places == ["meta"]:
        return f"the model's weights are on {' and '.join(places)}"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return "the model's weights are sharded, and gathered in each forward"
    if _cast_once(weights):
        return "autocast frees its copies of the weights, unless cache_enabled=False"
    for name, module in networks.named_modules():
        if has_hooks(module):
            name = name.partition(".")[2] or type(module).__name__
            return f"the model's {name} has a hook or a replaced forward, which a replay does not call"
        reads_device = getattr(module, "reads_device", None)  # of a module whose forward may wait for the device
        if reads_device is not None and reads_device(device):
            return "torch's grouped product waits for the GPU, except in bfloat16 on an H100 or a B200"
    return None


def _cast_once(weights: Iterable[Tensor]) -> bool:
    """Return True if autocast copies some of the weights once and frees the copies at its end."""
    if not torch.is_autocast_cache_enabled():
        return False
    kept = (one.device.type for one in weights if one.requires_grad and one.dtype == torch.float32)
    return any(map(torch.is_autocast_enabled, kept))


def networks(denoiser: object) -> Iterator[nn.Module]:
    """Return the networks of a denoiser and of those inside it, without the wrapper of `torch.compile`."""
    for value in getattr(denoiser, "__dict__", {}).values():
        for one in _items(value):
            if isinstance(one, nn.Module):
                yield getattr(one, "_orig_mod", one)
            elif hasattr(one, "spec"):
                yield from networks(one)


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a list, a tuple or a dict, and any other value as the only item."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)


def model(denoiser: object) -> tuple[Hashable, ...]:
    """Return the facts of a model that a recording relies on: addresses of weights, settings of modules, autocast."""
    found: list[Hashable] = []
    for network in networks(denoiser):
        kind = next((weight.device.type for weight in network.parameters()), "cpu")
        found += [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)]
        found += map(_settings, network.modules())
        found += [(address(weight), weight.dtype) for weight in (*network.parameters(), *network.buffers())]
    return tuple(found)


_OWN = vars(nn.Module()).keys()  # torch's own records of a module
_PLAIN = (bool, int, float, str)


def _settings(module: nn.Module) -> Hashable:
    """Return the class of a module, and its flags and numbers. Adapters, for example, are turned off by a flag."""
    found: list[Hashable] = [type(module)]
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN):
            found += [name, value]
        elif name not in _OWN and isinstance(value, list | tuple | dict):
            found += [name, *(one for one in _items(value) if isinstance(one, _PLAIN))]
    return tuple(found)


@dataclass
class InPlace(Generation):
    """A state and its buffers.

    key: the number of the state key. It is valid while the state has the objects `held`
    shared: the objects belong to a recording, and must be copied before anything changes them
    """

    buffers: Buffers = field(kw_only=True)
    key: int = -1
    held: tuple[Any, ...] = ()
    shared: bool = False

    def enter(self) -> None:
        """Copy the tensors that are not in the buffers yet into them."""
        if len(self.held) != len(PARTS) or any(map(is_not, objects(self), self.held)):
            self.key, self.shared = self.buffers.copy_in(self), False
            self.held = objects(self)

    def own(self) -> None:
        """Copy objects that belong to a recording."""
        if self.shared:
            restore(self, copies(objects(self)))
            self.shared, self.held = False, ()

    def replayed(self, step: Step) -> None:
        """Set the state to the objects and the key that a replay of `step` leaves."""
        restore(self, step.after)
        self.key, self.held, self.shared = step.key, step.after, True


class StaticEngine(Engine):
    """An engine that records and replays its steps.

    A recording is valid for one shape of canvas. Canvases are padded to a multiple of `multiple` columns, so that
    prompts of nearly the same length share recordings. The buffers of several shapes are kept.

    Args:
        record: a `GraphRecorder` that no other engine uses. None runs every step eagerly.
        must: refuse a plug-in whose state cannot be recorded. If false, its generations run eagerly, with a warning.
        options: entropy, samples and compile, as `Engine` has them.
    """

    multiple = 256

    def __init__(
        self,
        denoiser: Denoiser,
        plugins: Plugins,
        kernels: Backend = TORCH,
        record: Record | None = None,
        must: bool = True,
        **options: Any,
    ):
        super().__init__(denoiser, plugins, kernels, **options)
        self.record, self.must = record, must
        self.origin = denoiser
        self.settings = (plugins, kernels, options, self.inference_mode)
        # Buffers of finished generations, the latest last. Later ones reuse the recordings. Engines may share the list.
        self.free: list[Buffers] = []

    def begin(self, canvas: Canvas) -> Generation:
        """Create the initial state in buffers (`Engine.begin`). Generations that overlap have separate buffers."""
        buffers = self._found(canvas)
        plain = super().begin(canvas)
        state = InPlace(**{one.name: getattr(plain, one.name) for one in fields(plain)}, buffers=buffers)
        try:
            state.enter()
        except UnsupportedLeaf as error:
            why = f"{error}, whose contents cannot be recorded"
            if self.must:
                raise UserError(
                    "graph-unsupported", f"cuda_graph=true is not supported here ({why}). Remove it."
                ) from None
            warn(f"Steps run without CUDA graphs ({why}).")
            return plain
        return state

    @override
    def ask_and_poll(self, state: Generation) -> None:
        if isinstance(state, InPlace):
            state.own()
        super().ask_and_poll(state)

    @override
    def step(self, state: Generation) -> None:
        if not isinstance(state, InPlace):
            super().step(state)
            return
        assert state.wanted is not None
        if self.record is None or state.wanted.sizes.computed > MOST:
            self._eager(state)
            return
        state.enter()
        sizes = rounded(state.canvas, state.wanted.sizes)
        steps, key = state.buffers.steps, (state.key, sizes)
        step = steps.get(key)
        if step is None:
            state.own()
            state.wanted = replace(state.wanted, sizes=sizes)
            if key not in steps:
                steps[key] = None
            elif state.buffers.make_room(RECORDED):
                step = steps[key] = self._recorded(state, self.record)
            else:
                warn(f"{RECORDED} steps are recorded as CUDA graphs, and others run without one. {COUNTED}")
            if step is None:
                self._eager(state)
                return
        step.replay()
        step.generation = state.buffers.generation
        state.replayed(step)

    def poll(self, state: Generation) -> None:
        """Read sizes and finished rows (`Engine.poll`). `InPlace.key` stays valid, since it does not contain sizes."""
        before = state.wanted
        super().poll(state)
        if isinstance(state, InPlace) and state.held and before is state.held[WANTED]:
            state.held = (*state.held[:WANTED], state.wanted, *state.held[WANTED + 1 :])

    def end(self, state: Generation) -> None:
        """Free the buffers for a later generation (`Engine.end`)."""
        if isinstance(state, InPlace):
            # The latest stay whatever their size: most generations are followed by one like them.
            self._make_room(KEPT - 1, max(0, ROOM - state.buffers.size))
            self.free.append(state.buffers)

    def _eager(self, state: InPlace) -> None:
        """Run a step without a recording, and copy its results into the buffers."""
        state.own()
        super().step(state)
        state.enter()

    def _recorded(self, state: InPlace, record: Record) -> Step | None:
        """Record the next step. If that fails, return None and record no further step."""
        before = copies(objects(state))
        state.buffers.complete = True

        def run() -> None:
            Engine.step(self, state)
            state.key = state.buffers.copy_in(state)

        try:
            return Step(record(run), objects(state), state.key)
        except Exception as error:  # what the step itself raises, it raises again without a recording
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and isinstance(cause.__context__, Exception):
                # ending a recording that failed fails too
                cause = cause.__context__
            self.record = None
            warn(f"A step cannot be recorded as a CUDA graph and runs without one ({first_line(cause)}).")
            return None
        finally:
            state.buffers.complete = False
            restore(state, before)
            state.held = ()

    def _found(self, canvas: Canvas) -> Buffers:
        """Return free buffers that match this canvas and these weights, or allocate new ones."""
        device = canvas.ids.device
        # A stream does not wait for another one, which may still work on buffers of a generation that was given up.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        fits = (canvas.ids.shape, stream, self.record), device, model(self.denoiser)
        self.free[:] = [one for one in self.free if one.fits[1:] == fits[1:]]
        for at in reversed(range(len(self.free))):
            if self.free[at].fits == fits:
                found = self.free.pop(at)
                found.generation += 1
                return found
        self._make_room(KEPT - 1, ROOM)
        return Buffers(fits)

    def _make_room(self, most: int, room: int) -> None:
        """Delete the oldest free buffers until at most `most` of them are left, with at most `room` bytes in all."""
        sizes = [one.size for one in self.free]
        while len(self.free) > most or sum(sizes) > room:
            del self.free[0], sizes[0]


def rounded(canvas: Canvas, sizes: Sizes) -> Sizes:
    """Return sizes rounded up to one of a few values, since each value needs a recording of its own.

    Up to 64 entries a matrix product takes as long as reading its weight, so only 16, 32 and 64 are used. Above, eight
    values from one power of two to the next are used, so at most an eighth is computed for nothing. The head's rows are
    a small part of a step, and are rounded to a power of two.
    """
    most = canvas.length
    return Sizes(
        queries=min(most, max(LEAST, 1 << (sizes.queries - 1).bit_length())),
        block=canvas.layout.width,
        computed=_up(sizes.computed),
        head_rows=max(LEAST, 1 << (sizes.head_rows - 1).bit_length()),
        longest=most if sizes.whole else min(max(most, sizes.longest), _up(sizes.longest)),
        whole=sizes.whole,
        stretch=None if sizes.stretch is None else 1 << (sizes.stretch - 1).bit_length(),
    )


def _up(size: int) -> int:
    """Return the lowest of the values in `rounded` that is not below `size`."""
    power = 1 << (size - 1).bit_length()
    if power <= 64:
        return max(LEAST, power)
    step = power // 16
    return -(-size // step) * step


def engine(
    denoiser: Denoiser,
    plugins: Plugins,
    kernels: Backend,
    noise: Noise,
    choice: bool | str,
    options: dict[str, Any],
    kept: list[StaticEngine],
) -> Engine:
    """Return the engine of `Sampler(cuda_graph=...)`.

    Args:
        choice: the option `cuda_graph`.
        options: entropy, samples and compile, as `Engine` has them.
        kept: engines that record steps, the latest last. One with the same settings is reused. A new one is appended,
            and shares their free buffers.

    Raises:
        UserError: `choice` is True and steps cannot be recorded.
    """
    why = None if choice is False else obstacle(plugins, noise, denoiser)
    if why is not None and choice is True:
        raise UserError("graph-unsupported", f"cuda_graph=true is not supported here ({why}). Remove it.")
    if why is not None or choice is False:
        return Engine(denoiser, plugins, kernels, **options)
    settings = (plugins, kernels, options, inference_mode(denoiser))
    kept[:] = [one for one in kept if one.origin is denoiser]
    found = next((one for one in kept if one.settings == settings), None)
    if found is None:
        found = StaticEngine(denoiser, plugins, kernels, GraphRecorder(), choice is True, **options)
        found.free = kept[-1].free if kept else found.free
    kept[:] = [*(one for one in kept if one is not found), found][-ENGINES:]
    return found
