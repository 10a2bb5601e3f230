"""The published loops whose inputs are soft: DMax and ReMix."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.published import PromptCounts, PublishedRejectionMixing
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.dmax import SURE, SoftParallel
from tests.conformance.block_causal import to_block_end
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size, Steps


class SoftArguments(BaseModel):
    """What DMax's `BlockDiffusionLLM` and its decoder take."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size
    block_length: Size = 32
    threshold: float
    early_stop: bool = True
    mask_id: Count | None = None
    eos_id: Count | None = None


class MixingArguments(BaseModel):
    """What `decoding_remix` takes, with its defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 256
    block_length: Size = 128
    temperature: float = Field(default=0.0, ge=0)
    threshold: float = 0.9
    js_threshold: float = 0.3
    beta_mix: float = 0.5
    mask_id: Count | None = None


@dataclass(frozen=True)
class NotedSoft(SoftParallel):
    """DMax, with notes of which inputs were soft in each forward and which tokens it replaced, of a single row."""

    soft: Steps = field(default_factory=list)
    overwritten: Steps = field(default_factory=list)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        self.soft.append(softened(canvas, query))
        self.overwritten.append(places(canvas, query, edit.commit & ~canvas.masked.gather(1, query.positions)))
        return edit, carry


@dataclass(frozen=True)
class NotedMixing(PublishedRejectionMixing):
    """ReMix, with notes of which masks were mixed in each forward, of a single row."""

    mixtures: Steps = field(default_factory=list)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        self.mixtures.append(softened(canvas, query))
        return super().tell(canvas, query, readout, carry)


def softened(canvas: Canvas, query: Query) -> list[int]:
    """Positions of the answer whose input was a mixture."""
    assert query.mixture is not None
    return places(canvas, query, query.mixture.where)


def places(canvas: Canvas, query: Query, chosen: Tensor) -> list[int]:
    """Positions of the first row's answer that are `chosen [B, Q]`."""
    return (query.positions[0][chosen[0]] - canvas.layout.first[0]).tolist()


def dmax(line: Line, checkpoints: Checkpoints) -> Setup:
    """DMax's loop with the exact cache. The record has a forward for the prompt, which rides with a block here."""
    args = line.arguments(SoftArguments)
    if args.threshold > SURE:
        raise Unsupported(f"a threshold above {SURE} may leave a block with masks in it")
    denoiser = checkpoints.load(line.model, args.mask_id, args.eos_id)
    rule = NotedSoft(args.threshold)
    sampler = Sampler(
        denoiser,
        scheduler=rule,
        blocks=FixedBlocks(args.block_length),
        stop=PromptCounts() if args.early_stop else "none",
        cache="block_causal",
        compat=True,
    )
    for notes in (rule.soft, rule.overwritten):
        notes.append([])  # the prompt's forward
    tokens = to_block_end(line, args.gen_length, args.block_length)
    counted = {"soft": rule.soft, "overwritten": rule.overwritten}
    return Setup(sampler, tokens, fill=denoiser.spec.eos_id, guided=lambda step: step == 0, counted=counted)


def remix(line: Line, checkpoints: Checkpoints) -> Setup:
    """ReMix's loop, without a cache."""
    args = line.arguments(MixingArguments)
    if line.batched or args.gen_length % args.block_length:
        raise Unsupported("the published loop takes one prompt at a time, and whole blocks")
    if args.temperature > 0:
        raise Unsupported("how ReMix draws is not recorded")
    rule = NotedMixing(args.threshold, args.js_threshold, args.beta_mix)
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id),
        scheduler=rule,
        blocks=FixedBlocks(args.block_length),
        stop="none",
        compat=True,
    )
    return Setup(sampler, args.gen_length, counted={"mixed": rule.mixtures})
