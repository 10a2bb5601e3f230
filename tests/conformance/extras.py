"""Methods of which no run came with the specifications: CCD, SlowFast, ParallelBench's RCR and ReMDM, Sparse-dLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.sparse import SparseCache
from dllm_sampler.core.protocols import Denoiser, Scheduler
from dllm_sampler.guides import TopK
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import PublishedFixedSteps, PublishedRunningConfidence, PublishedSlowFast
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.ccd import Coherent
from dllm_sampler.schedulers.remdm import Remdm
from tests.conformance import llada
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.dream import SCORES
from tests.conformance.lines import Count, Line, Size


class CoherentArguments(BaseModel):
    """What CCD's `diffusion_generate` takes."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    steps: Size
    alg: Literal["maskgit_plus", "topk_margin", "entropy"]
    seek_mode: bool
    expand_ratio: float
    top_k: Size | None = 50  # see `dream.Arguments`


class SlowFastArguments(llada.Loop):
    """What SlowFast's loop takes."""

    k_exploration_steps: Count = 6
    cycle_len_confidence_threshold: float = 0.3
    cycle_length_stability_window: Size = 2
    cycle_length_stability_std_dev_threshold: float = 1.0
    high_confidence_threshold: float = 0.9


class FixedArguments(llada.Loop):
    """What the loops of ParallelBench and Sparse-dLLM take."""

    steps: Size = 128
    remdm_steps: Count | None = None
    remdm_number: Size | None = None
    kernel_size: Size | None = None
    keep_ratio: float = 0.5


def ccd(line: Line, checkpoints: Checkpoints) -> Setup:
    """CCD and CCD-DS (`seek_mode`) on Dream."""
    args = line.arguments(CoherentArguments)
    if args.max_new_tokens % args.steps:
        raise Unsupported("steps that do not divide the tokens: the published code rounds down and may leave masks")
    if args.seek_mode and args.max_new_tokens != args.steps:
        raise Unsupported("several tokens per step: published CCD-DS may turn one back into a mask")
    rule = Coherent(args.seek_mode, args.steps, SCORES[args.alg], expand=args.expand_ratio)
    guides = [] if args.top_k is None else [TopK(measured=True, k=args.top_k)]
    denoiser = checkpoints.load(line.model)
    sampler = Sampler(
        denoiser, scheduler=rule, blocks=FullBlock(), stop="none", cache="none", guide=guides, compat=True
    )
    return Setup(sampler, args.max_new_tokens)


def slowfast(line: Line, checkpoints: Checkpoints) -> Setup:
    """SlowFast's loop without its cache."""
    args = line.arguments(SlowFastArguments)
    scheduler = PublishedSlowFast(
        args.high_confidence_threshold,
        args.cycle_len_confidence_threshold,
        args.k_exploration_steps,
        args.cycle_length_stability_window,
        args.cycle_length_stability_std_dev_threshold,
    )
    return _setup(line, checkpoints, args, scheduler)


def rcr(line: Line, checkpoints: Checkpoints) -> Setup:
    """ParallelBench's RCR."""
    args = line.arguments(FixedArguments)
    return _setup(line, checkpoints, args, PublishedRunningConfidence(args.steps))


def remdm(line: Line, checkpoints: Checkpoints) -> Setup:
    """ParallelBench's ReMDM."""
    args = line.arguments(FixedArguments)
    if args.remdm_steps is None or args.remdm_number is None:
        raise Unsupported("ReMDM without remdm_steps and remdm_number")
    scheduler = Remdm(steps=args.steps, revisions=args.remdm_steps, tokens=args.remdm_number)
    return _setup(line, checkpoints, args, scheduler)


def sparse(line: Line, checkpoints: Checkpoints) -> Setup:
    """Sparse-dLLM on LLaDA."""
    args = line.arguments(FixedArguments)
    denoiser = Measured(checkpoints.load(line.model, args.mask_id))
    cache = SparseCache(keep=args.keep_ratio, kernel=args.kernel_size or 1, delay=1)
    made = llada.setup(line, args, denoiser, PublishedFixedSteps(args.steps), cache=cache)
    return replace(made, measured=denoiser)


def _setup(line: Line, checkpoints: Checkpoints, args: llada.Loop, scheduler: Scheduler) -> Setup:
    if args.draws:
        raise Unsupported("no order of draws is known for this loop")
    denoiser: Denoiser = guided(checkpoints.load(line.model, args.mask_id), args.cfg_scale)
    return llada.setup(line, args, denoiser, scheduler)
