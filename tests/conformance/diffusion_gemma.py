"""DiffusionGemma's `generate` in transformers: canvas after canvas, each by the entropy-bound sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.entropy_renoise import EntropyRenoise
from tests.conformance.block_causal import StopAt
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size, Steps, Tokens


class Arguments(BaseModel):
    """What `generate` takes, with its defaults. A null is the default, as it is there, or never stops early."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size = 256
    max_denoising_steps: Size = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = Field(default=0.1, gt=0)
    stability_threshold: Count | None = 1
    confidence_threshold: Annotated[float, Field(gt=0)] | None = 0.005
    canvas_length: Size | None = None
    eos_token_id: Count | list[Count] | None = None
    pad_token_id: Count | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id or ())


@dataclass(frozen=True)
class Watched(EntropyRenoise):
    """The scheduler, with a record of the canvas that each forward saw and the positions that it accepted, of row 0."""

    canvases: list[Tokens] = field(init=False, default_factory=list, repr=False)
    accepted: Steps = field(init=False, default_factory=list, repr=False)

    @override
    def accepts(self, canvas: Canvas, query: Query, entropy: Tensor) -> Tensor:
        chosen = super().accepts(canvas, query, entropy)
        self.canvases.append(query.ids[0, 0].tolist())
        self.accepted.append((query.positions[0][chosen[0]] - canvas.layout.first[0]).tolist())
        return chosen


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """One prompt: the rows of a published batch wait for one another, and so share their draws; ours do not wait."""
    args, denoiser = line.arguments(Arguments), checkpoints.load(line.model)
    canvas = denoiser.spec.block_length
    if canvas is None or args.canvas_length not in (None, canvas):
        raise Unsupported(f"canvas_length {args.canvas_length} is not the checkpoint's")
    if line.batched:
        raise Unsupported("the rows of a batch wait for one another and share their draws")
    if line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    scheduler = Watched(
        args.entropy_bound,
        args.max_denoising_steps,
        args.t_min,
        args.t_max,
        args.stability_threshold,
        args.confidence_threshold,
    )
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        stop=StopAt(args.ends) if args.ends else "none",
        noise=ReplayNoise(line.rng.torch_manual_seed, "dream"),
    )
    tokens = -(-args.max_new_tokens // canvas) * canvas  # whole canvases, and what is too long is not dropped
    return Setup(sampler, tokens, accepted=scheduler.accepted, ends=args.ends, pad=args.pad_token_id)
