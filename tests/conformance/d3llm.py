"""d3LLM's published loops for LLaDA and Dream, with and without their cache."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.multi_block import MultiBlock
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.protocols import Blocks, Cache, Scheduler, Stop
from dllm_sampler.published import (
    HeldProgress,
    OneAfterAnother,
    PublishedDelayedPrefix,
    PublishedFill,
    StaleMasks,
    StrictEntropy,
)
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.entropy import EntropyThreshold
from dllm_sampler.stops.end_tokens import NoStop
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size

NEVER = 10000  # the loops' own bound on forwards


class Arguments(BaseModel):
    """What the loops take, with the defaults of their functions; `cache` tells two functions of LLaDA's apart."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size = 512
    block_size: Size = 32
    threshold: float | None = 0.5
    block_add_threshold: float = 0.5
    decoded_token_threshold: float = 0.5
    early_stop: bool = False
    cache: bool = False
    cache_delay_iter: Count = NEVER
    refresh_interval: Size = NEVER
    temperature: float = 0.0
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    alg: Literal["entropy_threshold"] = "entropy_threshold"
    steps: Size = 128  # without effect
    mask_id: Count | None = None
    eos_token_id: Count | None = None


def multi_block(line: Line, checkpoints: Checkpoints) -> Setup:
    """Both models' loops: Dream's differ in the bound, in what a step must commit, and in when a block waits.

    `decoded_token_threshold` is without effect up to 1.
    """
    args = line.arguments(Arguments)
    if args.temperature > 0 or args.remasking == "random":
        raise Unsupported("no order of draws is known for these loops")
    if args.decoded_token_threshold > 1 or not 0 < args.block_add_threshold <= 1:
        raise Unsupported("thresholds outside (0, 1]")
    denoiser = Measured(checkpoints.load(line.model, args.mask_id, args.eos_token_id if args.early_stop else None))
    dream = denoiser.spec.shift
    if args.max_new_tokens % args.block_size and not (dream and args.cache):
        raise Unsupported("blocks that do not divide the answer: the published loop makes forwards without end")
    bound = NEVER - 1.0 if args.threshold is None else args.threshold
    scheduler: Scheduler = StrictEntropy(bound) if dream else EntropyThreshold(bound)
    blocks: Blocks = MultiBlock(args.block_size, args.block_add_threshold)
    stop: Stop = NoStop()
    if args.early_stop:
        scheduler, stop = StaleMasks(scheduler), PublishedFill()
        blocks = HeldProgress(args.block_size, args.block_add_threshold)
    cache: Cache = NoCache()
    if args.cache:
        kind = PublishedDelayedPrefix if dream else OneAfterAnother
        cache = kind(args.cache_delay_iter, args.refresh_interval)
    sampler = Sampler(denoiser, scheduler=scheduler, blocks=blocks, stop=stop, cache=cache, compat=True)
    return Setup(sampler, args.max_new_tokens, measured=denoiser)
