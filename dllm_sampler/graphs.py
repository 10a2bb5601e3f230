"""Steps in place: a generation's tensors stay where they are, so that a CUDA graph can repeat a step without the host.

A graph is a recording of launches on fixed addresses. So the state lives in buffers, a step's outcome is copied into
them, and what the host decides in a step (sizes, the flags that a cache keeps as plain numbers) is the key under which
the step is recorded. The first step of a key runs as always, which also warms up what a recording may not do: compile,
allocate workspaces. The second is recorded; from then on it is replayed.

What a step committed may decide how large the next one is. The host need not wait to know: it sends a recording of each
kind of step that may come next, such as one inside a block and one that opens a block. Each looks at what the step
before measured, and does nothing if it is not the right one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor, nn

from dllm_sampler import bookkeeping, launches, layout
from dllm_sampler.buffers import Buffers, Late, Step, address, copied, restored
from dllm_sampler.canvas import Canvas, Sizes
from dllm_sampler.capture import Record
from dllm_sampler.errors import UserError
from dllm_sampler.kernels.backend import TORCH, Backend, first_line, warn
from dllm_sampler.loop import Engine, State
from dllm_sampler.models.fused import hooked
from dllm_sampler.models.moe import Experts, waits
from dllm_sampler.noise import CounterNoise, Noise
from dllm_sampler.plugins import Plugins
from dllm_sampler.protocols import Denoiser

KEPT = 8  # shapes of canvas whose recordings are kept
ROOM = 2**31  # bytes of buffers, beyond which the oldest go before new ones are made


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
        return f"cache={type(plugins.cache).__name__} reads the device inside a step"
    if type(noise) is not CounterNoise:
        return f"{type(noise).__name__} draws on the host"
    if spec.encoder:
        return "this model's encoder keeps what it read in an object of its own"
    if not plugins.scheduler.static:
        return f"scheduler={type(plugins.scheduler).__name__} asks a second model, which keeps a state of its own"
    return _unfit(nn.ModuleList(networks(denoiser)), spec.device)


def _unfit(networks: nn.ModuleList, device: torch.device) -> str | None:
    """What a forward does besides launches on one GPU; None: nothing."""
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
class InPlace(State):
    """A state and its buffers."""

    buffers: Buffers = field(kw_only=True)
    measured: Tensor | None = None  # `layout.measure` or `bookkeeping.ended`: part of the step and its recording
    late: Late | None = None  # what was measured after the step before
    sent: Sequence[Step] = ()  # to be sent, then sent, before `late` is read: one of them at most does something
    makeup: tuple[list[object], int] | None = None  # what a step left at home, and `Buffers.settle`'s number of it

    def settle(self) -> int:
        """See `Buffers.settle`. What is as the last step left it need not be looked at again: the device waits."""
        if self.makeup is None or any(one is not other for one, other in zip(self.makeup[0], _held(self), strict=True)):
            return self.buffers.settle(self)
        return self.makeup[1]

    def become(self, step: Step) -> None:
        """Take over the objects that a replay of `step` leaves; their numbers are where it put them."""
        restored(self, step.after)
        self.makeup = _held(self), step.makeup


def _held(state: State) -> list[object]:
    """The objects that a state holds, but for those in `BETWEEN`."""
    canvas = [value for name, value in vars(state.canvas).items() if name != "sizes"]
    return [*canvas, state.cache, state.carry, state.bad, state.recorder, state.ahead, state.previous]


class StaticEngine(Engine):
    """An engine whose steps happen in place, and are recorded and replayed.

    A recording is good for one shape of canvas. So that prompts of nearly the same length share it, they are padded to
    a multiple of `grain`, and the buffers of several shapes are kept.

    record: what makes a step repeatable, `capture.cuda`; None: each runs as always, in place all the same
    must: refuse a plug-in whose state no recording knows of; else its generations run as always, with a warning
    chooses: recordings can look for themselves whether they are wanted (`capture.chooses`)
    """

    grain = 32

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
        chooses: bool = False,
    ):
        super().__init__(denoiser, plugins, poll_every, kernels, entropy, samples, compile)
        self.record, self.must, self.chooses = record, must, chooses
        self.free: list[Buffers] = []  # of generations that are over, the latest last: one like it finds its recordings

    def begin(self, canvas: Canvas) -> State:
        """See `Engine.begin`. Generations that overlap in time have buffers of their own."""
        buffers = self._found(canvas)
        plain = super().begin(canvas)
        state = InPlace(**{one.name: getattr(plain, one.name) for one in fields(plain)}, buffers=buffers)
        try:
            buffers.settle(state)
        except UserError as error:
            if self.must:
                raise
            warn(f"steps run without CUDA graphs: {error}")
            return plain
        return state

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
        """Let the oldest free buffers go until there are at most so many, and as large in all."""
        sizes = [one.size for one in self.free]
        while len(self.free) > most or sum(sizes) > room:
            del self.free[0], sizes[0]

    def end(self, state: State) -> None:
        """See `Engine.end`. A later generation may have the buffers."""
        if isinstance(state, InPlace):
            # The latest stay whatever their size: most generations are followed by one like them.
            self._make_room(KEPT - 1, max(0, ROOM - state.buffers.size))
            self.free.append(state.buffers)

    def step(self, state: State) -> None:
        """See `Engine.step`."""
        if not isinstance(state, InPlace):
            return super().step(state)
        buffers = state.buffers
        if state.sent:
            assert state.measured is not None
            state.settle()  # the host may have ended rows
            buffers.ask(state.measured)
            for step in state.sent:
                step.replay()
            return  # `_check` finds which it was
        state.canvas = replace(state.canvas, sizes=self._rounded(state.canvas, state.canvas.sizes))
        numbers, state.measured = self._seen(state), None
        key = state.settle(), state.canvas.sizes, self._question(state), numbers is not None
        step = buffers.steps.get(key)
        if step is None and key in buffers.steps and self.record is not None:
            step = buffers.steps[key] = self._recorded(state, self.record, numbers)
        if step is None:
            makeup = self._measured(state)
            buffers.steps.setdefault(key, None)
            state.makeup = _held(state), makeup
        else:
            if numbers is not None:
                buffers.ask(numbers)
            step.replay()
            state.become(step)

    def _measured(self, state: InPlace) -> int:
        """A step, what the host will want to know of it, and all of that at home; see `Buffers.settle`."""
        question = self._question(state)
        super().step(state)
        if question == "sizes":
            state.measured = super().measure(state)
        elif question == "end":
            with launches.by(self.kernels.step):
                state.measured = bookkeeping.ended(state.canvas.done, state.bad)
        return state.buffers.settle(state)

    def _question(self, state: InPlace) -> Literal["sizes", "end"] | None:
        """What the host will ask after the next step."""
        if not self._glances or (self.plugins.cache.stores and not state.coming):
            return "sizes"
        return None if state.coming and self.lasting else "end"

    def measure(self, state: State) -> Tensor:
        """See `Engine.measure`. It is there already."""
        return state.measured if isinstance(state, InPlace) and state.measured is not None else super().measure(state)

    def _seen(self, state: InPlace) -> Tensor | None:
        """What the step before measured, if the next one's recording can see in it that it is the right one."""
        measured = state.measured
        return measured if self.chooses and measured is not None and len(measured) == layout.SIZES else None

    def _recorded(self, state: InPlace, record: Record, numbers: Tensor | None) -> Step | None:
        """numbers: what the step before measured, if the recording is to look at it."""
        wanted = None
        if numbers is not None:
            state.buffers.ask(numbers)
            wanted = state.buffers.wanted(state.canvas.sizes)
            wanted()  # loads its kernels, which a recording may not do
        before = copied(state)
        state.buffers.complete = True
        makeup: list[int] = []
        try:
            replay = record(lambda: makeup.append(self._measured(state)), wanted)
            return Step(replay, copied(state), makeup[0])
        except Exception as error:  # what the step itself raises, it raises again without a recording
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and isinstance(cause.__context__, Exception):
                # ending a recording that failed fails too
                cause = cause.__context__
            if wanted is None:
                self.record = None
                warn(f"a step cannot be recorded as a CUDA graph and runs without one: {first_line(cause)}")
            else:  # what is recorded without a condition may do more
                self.chooses = False
                warn(f"the host waits for a step before it sends the next: {first_line(cause)}")
            return None
        finally:
            state.buffers.complete = False
            restored(state, before)

    def _rounded(self, canvas: Canvas, sizes: Sizes) -> Sizes:
        """Sizes that are large enough and fewer: a recording is good for one."""
        most = self.plugins.blocks.lookahead(canvas.length - canvas.origin)

        def up(size: int) -> int:  # eight sizes from one power of two to the next: no more than an eighth in vain
            step = (1 << max(3, size.bit_length() - 1)) // 8
            return min(canvas.length, -(-size // step) * step)

        return replace(
            sizes,
            all_open=sizes.all_open and self.plugins.scheduler.drafts,  # nobody else asks
            masks=min(most, 1 << max(0, sizes.masks - 1).bit_length()),
            block=min(most, 1 << max(0, sizes.block - 1).bit_length()),
            computed=sizes.computed if sizes.whole else up(sizes.computed),
            reach=None if sizes.reach is None else up(sizes.reach),
        )

    def poll(self, state: State, step: int, last: bool = False) -> None:
        """See `Engine.poll`. The host reads how the step *before* ended, so the device has work meanwhile.

        Where the next sizes are known, the price is one forward more, in which all rows rest; where they are not, all
        that was sent may have been wrong, and the right step is sent then.
        """
        if isinstance(state, InPlace) and state.sent:
            self._check(state)
            if state.finished:
                return None
        if not isinstance(state, InPlace) or not self._glances:
            return super().poll(state, step, last)
        known = self._known(state)
        if known is None and not self.plugins.cache.stores:
            known = layout.widest(state.canvas, self.plugins.blocks)
        if known is None or last:
            if last or not self._guess(state):
                state.late, expected = None, self._expected(state)
                measured = self._look(state, known)
                self._learn(state, measured, expected)
            return None
        self._resize(state, known)
        if state.measured is not None:
            before, state.late = state.late, Late(state.measured)
            if before is not None and self._read(state, before.read()).bad:
                self.refuse(state)
        return None

    def _expected(self, state: InPlace) -> list[Sizes]:
        """Sizes that a step sent ahead may have: one of them fits at most, as no two are of one `layout.kind`."""
        if not self.chooses:
            return []
        now, known = state.canvas.sizes, state.buffers.widest
        likely = (known | {layout.kind(now): now}).values()
        return [self._rounded(state.canvas, replace(one, branches=now.branches)) for one in likely]

    def _guess(self, state: InPlace) -> bool:
        """Choose what to send without knowing how the last step ended, if such steps are recorded."""
        numbers = self._seen(state)
        if numbers is None:
            return False
        makeup, steps = state.settle(), state.buffers.steps
        found = [steps.get((makeup, sizes, "sizes", True)) for sizes in self._expected(state)]
        state.sent = [step for step in found if step is not None]
        if state.sent:
            state.late = Late(numbers)
        return bool(state.sent)

    def _check(self, state: InPlace) -> None:
        """Read what the last step was sent without: which it was. If it was none, make it."""
        assert state.late is not None
        measured, sent = state.late.read(), state.sent
        state.late, state.sent = None, ()
        made = next((step for step in sent if layout.fit(measured, step.sizes)), None)
        expected = self._expected(state) if made is None else []
        if made is not None:
            state.become(made)
        found = self._read(state, measured)
        if found.bad:
            self.refuse(state)
        if found.sizes is None:
            return
        self._resize(state, found.sizes)
        self._learn(state, measured, expected)
        if made is None:
            self.step(state)

    def _learn(self, state: InPlace, measured: list[int], expected: list[Sizes]) -> None:
        """Remember how large the next step must be; it is as was expected if that is enough, and so is recorded."""
        state.buffers.remember(state.canvas.sizes)
        fits = [sizes for sizes in expected if len(measured) == layout.SIZES and layout.fit(measured, sizes)]
        if fits:
            self._resize(state, fits[0])

    @property
    def _glances(self) -> bool:
        """Whether the host may look at a step while the next one runs."""
        return self.record is not None and not self.plugins.scheduler.drafts
