"""The published loops of block-causal models: SDAR (and TraDo), LLaDA2.0 and LLaDA2.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.values import Canvas, Noise
from dllm_sampler.guides import Temperature, TopK, TopP
from dllm_sampler.published import EarlyStop, PublishedEditing, PublishedRemasking, StopAt, UnrefreshedBlocks
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.dynamic import DynamicThreshold
from dllm_sampler.schedulers.editing import Suspicion
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size

NEVER = 1.0  # no probability is above it


class Sampling(BaseModel):
    """How both loops draw, with SDAR's defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    temperature: float = Field(default=1.0, gt=0)
    top_k: Count | None = None
    top_p: float | None = None

    @property
    def guides(self) -> list[Guide]:
        """In the published order; the probability is that of the filtered distribution. Greedy runs filter nothing."""
        if self.temperature == 0:
            return []
        guides: list[Guide] = [Temperature(measured=True, value=self.temperature)]
        if self.top_k:
            guides.append(TopK(measured=True, k=self.top_k))
        if self.top_p is not None and self.top_p < 1:
            guides.append(TopP(measured=True, p=self.top_p))
        return guides


class SdarLoop(BaseModel):
    """What SDAR's `block_diffusion_generate` takes, besides how it draws, with its defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    block_length: Size = 8
    denoising_steps: Size = 8
    remasking_strategy: Literal["low_confidence_static", "low_confidence_dynamic", "sequential"] = (
        "low_confidence_dynamic"
    )
    confidence_threshold: float = 0.85
    stopping_criteria_idx: list[Count] | None = None
    mask_id: int | None = None


class SdarArguments(Sampling, SdarLoop):
    """All that it takes."""


class Llada2Arguments(Sampling):
    """What LLaDA2's `generate` takes, with its defaults."""

    temperature: float = Field(default=0.0, ge=0)
    block_length: Size = 32
    steps: Size = 32
    gen_length: Size = 2048
    eos_early_stop: bool = False
    minimal_topk: Size = 1
    threshold: float = 0.95
    eos_id: int | None = None
    mask_id: int | None = None


class EditingArguments(Llada2Arguments):
    """What LLaDA2.1's `generate` takes; it leaves `steps` and `minimal_topk` unused."""

    num_to_transfer: Size = 1
    editing_threshold: float = 0.5
    max_post_steps: Count = 16


class RemaskingArguments(EditingArguments):
    """What T2M's `generate` takes, and the attributes of its model. It leaves `editing_threshold` unused."""

    remask_strategy: Suspicion = "low_prob"
    remask_threshold: float | None = None
    max_remask_per_pos: Count = 5
    max_remask_ratio: float = 0.25


@dataclass(frozen=True)
class Greedy(ReplayNoise):
    """No noise: the recorded run took the best token of a distribution that is otherwise sampled from."""

    seed: int = 0
    layout: Literal["dream", "llada", "sdar"] = "sdar"

    @override
    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        return torch.zeros(len(head_rows.place), vocab, device=head_rows.place.device)


def sdar(line: Line, checkpoints: Checkpoints) -> Setup:
    """SDAR's loop: blocks are decoded to their end, and forwards that only store are counted but not listed."""
    args = line.arguments(SdarArguments)
    static = args.remasking_strategy != "low_confidence_dynamic"
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id),
        scheduler=DynamicThreshold(
            NEVER if static else args.confidence_threshold,
            args.denoising_steps,
            "position" if args.remasking_strategy == "sequential" else "confidence",
        ),
        blocks=FixedBlocks(args.block_length),
        stop=StopAt(tuple(args.stopping_criteria_idx)) if args.stopping_criteria_idx else "none",
        cache=BlockCausalCache("separate"),
        guide=args.guides,
        noise=_noise(line),
        compat=True,
    )
    return Setup(sampler, to_block_end(line, args.gen_length, args.block_length), only_commits=True)


def llada2(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA2's loop: blocks are decoded to their end, and the answer is cut afterwards."""
    args = line.arguments(Llada2Arguments)
    denoiser = checkpoints.load(line.model, args.mask_id, args.eos_id)
    steps = min(args.steps, args.gen_length // args.minimal_topk)
    sampler = Sampler(
        denoiser,
        scheduler=DynamicThreshold(args.threshold, max(1, steps)),
        blocks=FixedBlocks(args.block_length),
        stop=EarlyStop() if args.eos_early_stop else "block",
        guide=args.guides,
        noise=_noise(line) if args.temperature > 0 else None,
        compat=True,
    )
    tokens = to_block_end(line, args.gen_length, args.block_length)
    # The published stop cuts behind the first end token of all, which may be the prompt's.
    empties = args.eos_early_stop and denoiser.spec.eos_id in line.prompts[0]
    return Setup(sampler, tokens, cut=args.gen_length, empties=empties)


def llada2_1(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA2.1's loop: tokens of the block are edited, and the answer is cut afterwards."""
    args = line.arguments(EditingArguments)
    if args.temperature > 0:
        raise Unsupported("no order of draws is published for token editing")
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id, args.eos_id),
        scheduler=PublishedEditing(
            args.threshold, args.editing_threshold, quota=args.num_to_transfer, extra=args.max_post_steps
        ),
        blocks=FixedBlocks(args.block_length),
        stop="block" if args.eos_early_stop else "none",
        compat=True,
    )
    return Setup(sampler, to_block_end(line, args.gen_length, args.block_length), cut=args.gen_length)


def t2m(line: Line, checkpoints: Checkpoints) -> Setup:
    """T2M's loop: LLaDA2.1's, in which suspect tokens of the block become masks again."""
    args = line.arguments(RemaskingArguments)
    if args.temperature > 0:
        raise Unsupported("no order of draws is published for token editing")
    denoiser = Measured(checkpoints.load(line.model, args.mask_id, args.eos_id))
    sampler = Sampler(
        denoiser,
        scheduler=PublishedRemasking(
            args.threshold,
            quota=args.num_to_transfer,
            extra=args.max_post_steps,
            remask=args.remask_strategy,
            remask_threshold=args.remask_threshold,
            remask_limit=args.max_remask_per_pos,
            remask_share=min(args.max_remask_ratio, 1.0),
            eos=denoiser.spec.eos_id if args.eos_early_stop else None,
        ),
        blocks=FixedBlocks(args.block_length),
        stop="block" if args.eos_early_stop else "none",
        cache=UnrefreshedBlocks(),
        compat=True,
    )
    tokens = to_block_end(line, args.gen_length, args.block_length)
    return Setup(sampler, tokens, cut=args.gen_length, measured=denoiser)


def _noise(line: Line) -> Noise:
    if line.rng is not None:
        return ReplayNoise(line.rng.torch_manual_seed, "sdar")
    if str(line.params.get("token_draw", "")).startswith("argmax"):
        return Greedy()
    raise Unsupported("a random run without rng cannot be repeated")


def to_block_end(line: Line, gen_length: int, block: int) -> int:
    """New tokens up to the end of the last block; blocks are counted from the prompt's first token."""
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    prompt = len(line.prompts[0])
    return -(-(prompt + gen_length) // block) * block - prompt
