"""Dream's published loops: `diffusion_generate`, and Fast-dLLM's with and without a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Blocks, Cache, Guide, Scheduler
from dllm_sampler.guides import Temperature, TopK, TopP
from dllm_sampler.published import (
    ForcedFirst,
    PublishedDualCache,
    PublishedFixedSteps,
    PublishedOrigin,
    PublishedPrefixCache,
)
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.budgeted import BudgetedThreshold
from dllm_sampler.schedulers.threshold import Threshold
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Line, Size

Score = Literal["confidence", "margin", "entropy"]
SCORES: dict[str, Score] = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}
THRESHOLD = "confidence_threshold"


class Arguments(BaseModel):
    """What `diffusion_generate` takes, with its defaults; Fast-dLLM adds those that follow `threshold`."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    steps: Size = 512
    alg: str = "origin"
    eps: float = 1e-3
    temperature: float | None = 1.0
    alg_temp: float | None = None
    mask_token_id: int | None = None
    # This and the temperature's are transformers' sampling defaults, which the published configuration inherits. An
    # explicit null is no filter.
    top_k: Size | None = 50
    top_p: float | None = None
    threshold: float = 0.9
    block_length: Size = 32
    dual_cache: bool = False

    @property
    def guides(self) -> list[Guide]:
        """In the published order; every score is read from the filtered distribution."""
        guides: list[Guide] = []
        if self.temperature:
            guides.append(Temperature(measured=True, value=self.temperature))
        if self.top_p is not None and self.top_p < 1:
            guides.append(TopP(measured=True, p=self.top_p))
        if self.top_k is not None:
            guides.append(TopK(measured=True, k=self.top_k))
        return guides


def dream(line: Line, checkpoints: Checkpoints) -> Setup:
    """Dream's own `diffusion_generate`: no blocks, and every planned step is made."""
    return steps(line, checkpoints, line.arguments(Arguments), NoCache())


def steps(line: Line, checkpoints: Checkpoints, args: Arguments, cache: Cache) -> Setup:
    """The loop of `diffusion_generate` under a cache.

    Raises:
        Unsupported: an unknown `alg`.
    """
    if args.alg == "origin":
        scheduler = PublishedOrigin(args.steps, args.eps)
    elif args.alg in SCORES:
        scheduler = _timesteps(args, SCORES[args.alg])
    else:
        raise Unsupported(f"alg {args.alg} is unknown")
    return _setup(line, checkpoints, args, scheduler, FullBlock(), cache, measured=cache.stores)


def fast_dllm(line: Line, checkpoints: Checkpoints) -> Setup:
    """Fast-dLLM for Dream. Its cached loops take blocks, and commit each block's first position by force."""
    args = line.arguments(Arguments)
    if not args.model_fields_set & {"block_length", "dual_cache"}:
        if args.alg != THRESHOLD:
            return dream(line, checkpoints)
        return _setup(line, checkpoints, args, BudgetedThreshold(args.threshold, args.steps), FullBlock(), NoCache())
    if args.temperature or args.alg_temp:
        raise Unsupported("no order of draws is published for a cached loop")
    # Whatever other algorithm is named, the published loop ranks by entropy.
    inner = Threshold(args.threshold) if args.alg == THRESHOLD else _timesteps(args, "entropy")
    cache = PublishedDualCache() if args.dual_cache else PublishedPrefixCache()
    blocks = FixedBlocks(args.block_length)
    # Blocks of one position still make an inner forward, because the loop looks for masks only afterwards.
    return _setup(line, checkpoints, args, ForcedFirst(inner), blocks, cache, wasted_block=1)


def _timesteps(args: Arguments, score: Score) -> PublishedFixedSteps:
    return PublishedFixedSteps(args.steps, score, "timestep", args.eps, args.alg_temp or 0.0)


def _setup(
    line: Line,
    checkpoints: Checkpoints,
    args: Arguments,
    scheduler: Scheduler,
    blocks: Blocks,
    cache: Cache,
    wasted_block: int | None = None,
    measured: bool = False,
) -> Setup:
    denoiser = Measured(checkpoints.load(line.model))
    if args.mask_token_id not in (None, denoiser.spec.mask_id):
        raise Unsupported(f"mask_token_id {args.mask_token_id} is not the checkpoint's")
    if (args.temperature or args.alg_temp or args.alg == "origin") and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=blocks,
        stop="none",
        cache=cache,
        guide=args.guides,
        noise=ReplayNoise(line.rng.torch_manual_seed, "dream") if line.rng else None,
        compat=True,
    )
    setup = Setup(sampler, args.max_new_tokens, rows_first=True, wasted_block=wasted_block)
    return replace(setup, measured=denoiser) if measured else setup
