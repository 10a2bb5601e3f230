"""`DiffusionGemmaPipeline` of diffusers 0.42.1 with its `DiscreteDDIMScheduler`: canvas after canvas, by its draws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.guides import Temperature
from dllm_sampler.published.stops import StopAt
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.discrete_ddim import CLEAN, NOISE, DiscreteDDIM
from dllm_sampler.stops.end_tokens import with_finish
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size


class Arguments(BaseModel):
    """What pipeline and scheduler take, with their defaults. A null never stops early."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 256
    num_inference_steps: Size = 48
    temperature: float = Field(default=0.0, ge=0)
    stability_threshold: Count = 1
    confidence_threshold: float | None = 0.005
    eos_early_stop: bool = True
    eos_token_id: Count | None = None
    corrector_steps: Count = 0
    corrector_k: int = 1
    corrector_selection: Literal["lowest_log_margin", "lowest_maxprob", "lowest_current_prob", "random"] = (
        "lowest_log_margin"
    )
    corrector_selection_tau: float = 1.0
    canvas_length: Size | None = None


@dataclass
class Draws:
    """The generator that the pipeline is given, in the order of its draws, and the events that they make."""

    rule: DiscreteDDIM
    generator: torch.Generator
    batched: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)  # of this forward
    settled: Tensor | None = None  # [B] rows of a batch that wait for the others, and their `best` tokens [B, Q]
    best: Tensor = field(default_factory=lambda: torch.empty(0))

    def exponential(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What `torch.multinomial` divides probabilities by."""
        return torch.empty(shape, dtype=dtype).exponential_(generator=self.generator)

    def note(self, kind: str, index: int, **tensors: Tensor) -> None:
        """Record an event."""
        rows = {name: one.tolist() if self.batched else one[0].tolist() for name, one in tensors.items()}
        self.events.append({"kind": kind, "index": index, **rows})

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """See `Noise.tokens`. A sweep draws its own."""
        if not bool(self.rule.conditions(canvas).any()):
            return torch.zeros(len(head_rows.place), vocab)
        return head_rows.pick(-self.exponential(*head_rows.query.ids.shape, vocab).log())

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """See `Noise.order`."""
        drawn = torch.rand(positions.shape, generator=self.generator).clamp_(1e-12, 1.0 - 1e-12)
        return -torch.log(-torch.log(drawn))

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """See `Noise.uniform`. Routes are drawn otherwise."""
        raise NotImplementedError

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """See `Noise.ids`. A new canvas draws."""
        return self.integers(positions, vocab) if bool((canvas.age == 0).any()) else torch.zeros_like(positions)

    def integers(self, positions: Tensor, vocab: int) -> Tensor:
        """Return a random token for each position."""
        return torch.randint(vocab, positions.shape, generator=self.generator)


@dataclass(frozen=True)
class Recorded(DiscreteDDIM):
    """The scheduler with the draws of `torch.multinomial`, and a record of its events."""

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        draws, ids = _draws(canvas), query.ids[:, 0]
        found = super().tell(canvas, query, readout, carry)
        index, last = int(self.clock(canvas)[0][0]), draws.last
        if "routes" in last:
            after = torch.where(last["routes"] == CLEAN, readout.token[:, 0], ids)
            after = torch.where(last["routes"] == NOISE, last["noise"], after)
            draws.note("predict", index, before=ids, x0=readout.token[:, 0], **last, after=after)
        else:
            after = ids.scatter(1, last["positions"], last["tokens"])
            draws.note("correct", index, before=ids, **last, after=after)
        last.clear()
        return (self.waiting(canvas, query, *found), found[1]) if draws.batched else found

    def waiting(self, canvas: Canvas, query: Query, edit: Edit, carry: Carry) -> Edit:
        """Return the edit of a batch whose rows end a canvas together. A settled row has its best tokens until then."""
        draws, at, over = _draws(canvas), query.positions, edit.close_block
        assert over is not None and edit.remask is not None
        if bool((canvas.age == 0).all()) or draws.settled is None:
            draws.settled, draws.best = torch.zeros_like(over), edit.ids
        draws.best = torch.where(draws.settled[:, None], draws.best, carry[0].gather(1, at))
        settled = draws.settled = draws.settled | (carry[2] & over)
        last = self.clock(canvas)[0] + 1 == self.predictor_steps
        rows, over = settled[:, None], last | settled.all()
        ids = torch.where(rows, draws.best, edit.ids)
        return replace(
            edit,
            ids=ids,
            commit=canvas.inside(at) & over[:, None],
            remask=canvas.inside(at) & ~over[:, None],
            keep_block=~over,
            close_block=over,
        )

    @override
    def routes(self, canvas: Canvas, positions: Tensor, law: Tensor) -> Tensor:
        draws = _draws(canvas)
        if not bool(self.conditions(canvas).any()):
            return torch.zeros_like(positions)
        route = (law.float() / draws.exponential(*law.shape)).argmax(-1)
        draws.last["routes"] = route
        return route

    @override
    def random_ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        draws = _draws(canvas)
        if "routes" not in draws.last:
            return torch.zeros_like(positions)
        draws.last["noise"] = found = draws.integers(positions, vocab)
        return found

    @override
    def swept(self, canvas: Canvas, query: Query, logits: Tensor, survival: Tensor) -> Tensor:
        return query.ids[:, 0] if "routes" in _draws(canvas).last else super().swept(canvas, query, logits, survival)

    @override
    def chosen(self, canvas: Canvas, positions: Tensor, doubt: Tensor) -> Tensor:
        found = super().chosen(canvas, positions, doubt)
        _draws(canvas).last["positions"] = found
        return found

    @override
    def draw(self, canvas: Canvas, positions: Tensor, law: Tensor) -> Tensor:
        draws = _draws(canvas)
        found = (law.exp() / draws.exponential(*law.shape, dtype=law.dtype)).argmax(-1)
        draws.last["tokens"] = found
        return found


@dataclass(frozen=True)
class Together(StopAt):
    """Rows end together, once each has an end token."""

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        return with_finish(edit, after.block_over(edit) & self.ends(after).any(1).all())


def _draws(canvas: Canvas) -> Draws:
    assert isinstance(canvas.layout.noise, Draws)
    return canvas.layout.noise


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """The pipeline. Rows of a batch share its draws, and go on until all are through."""
    args, denoiser = line.arguments(Arguments), checkpoints.load(line.model)
    length = denoiser.spec.block_length
    if length is None or args.canvas_length not in (None, length):
        raise Unsupported(f"canvas_length {args.canvas_length} is not the checkpoint's")
    if line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    rule = Recorded(
        args.num_inference_steps,
        args.corrector_steps,
        max(1, args.corrector_k),
        args.corrector_selection,
        args.corrector_selection_tau,
        max(1, args.stability_threshold),
        args.confidence_threshold,
    )
    draws = Draws(rule, torch.Generator().manual_seed(line.rng.torch_manual_seed), line.batched)
    end = args.eos_token_id if args.eos_early_stop else None
    sampler = Sampler(
        denoiser,
        scheduler=rule,
        stop="none" if end is None else Together((end,)),
        guide=[Temperature(args.temperature)] if args.temperature else None,
        noise=draws,
    )
    tokens = -(-args.gen_length // length) * length  # whole canvases
    return Setup(sampler, tokens, counted={"events": draws.events}, ends=())
