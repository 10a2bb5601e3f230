"""DSB and DCD: windows that slide, and their caches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.blocks.sliding import SlidingBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.sliding import Anchor, SlidingCache
from dllm_sampler.core.protocols import Blocks, Cache, Plan, Scheduler, Stop
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.published import FillAtBlock, FirstFromRefresh, PublishedFactor, StepQuota, WithoutLookahead
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.entropy import EntropyThreshold
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.fill import FillStop
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size


@dataclass(frozen=True)
class Watched(Measured):
    """Also takes down the window of each forward, counted from the answer's first column, and what it computes."""

    windows: list[list[int]] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """See `Denoiser`."""
        first, computed = int(canvas.layout.first), plan.wanted.computed[0].nonzero()[:, 0].tolist()
        self.windows.append([int(canvas.start) - first, int(canvas.stop) - first])
        self.columns.append([computed[0], computed[-1] + 1])
        return super().__call__(canvas, query, plan)


class DSBArguments(BaseModel):
    """What DSB's functions for LLaDA and Dream take, with the defaults. `use_cache` tells two functions apart."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    max_new_tokens: Size | None = None
    steps: Size = 128
    block_length: Size = 32
    max_block_length: int = -1
    temperature: float = 0.0
    alg: str = "confidence_threshold"
    remasking: str = "low_confidence"
    threshold: float | None = None
    factor: float | None = None
    use_cache: bool = False
    prefix_window: Count = 0
    suffix_window: Count = 0
    mask_id: Count | None = None


def dsb(line: Line, checkpoints: Checkpoints) -> Setup:
    """DSB's loops, with and without a cache."""
    args = line.arguments(DSBArguments)
    denoiser = Watched(checkpoints.load(line.model, args.mask_id))
    dream, tokens = denoiser.spec.shift, args.max_new_tokens or args.gen_length
    if line.batched or args.temperature > 0 or args.remasking != "low_confidence":
        raise Unsupported("no order of draws is known for these loops, and they take one prompt")
    if args.alg != "confidence_threshold":
        raise Unsupported(f"alg {args.alg} takes a time step for the window's place in the cached loop")
    if args.use_cache and 0 <= args.max_block_length < args.block_length:
        raise Unsupported("the first window of the published loop is wider than max_block_length")
    if args.suffix_window or (dream and args.use_cache and not args.prefix_window):
        raise Unsupported("the published loop reads the wrong rows with this window")
    scheduler: Scheduler
    if args.factor is not None:
        scheduler = PublishedFactor(args.factor)
    elif args.threshold is not None or dream:
        scheduler = Threshold(0.9 if args.threshold is None else args.threshold)
    elif args.use_cache or args.steps > tokens:
        raise Unsupported("the published loop loses a part of such a quota")
    else:
        scheduler = StepQuota(tokens // args.steps, tokens % args.steps)
    cache: Cache = NoCache()
    if args.use_cache:
        cache = SlidingCache(args.prefix_window, 0, args.block_length)
        scheduler = FirstFromRefresh(scheduler, args.block_length) if dream else scheduler
    blocks = SlidingBlocks(args.block_length, None if args.max_block_length < 0 else args.max_block_length)
    return _setup(denoiser, scheduler, blocks, "none", cache, tokens, compat=True)


class DCDArguments(BaseModel):
    """The fields of DCD's `DecodeConfig`, and `lookahead` of its wrapper of Dream, with the defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    window_type: str = "sliding"
    generate_length: Size = 512
    initial_window_length: Size = 32
    block_size: Size = 32
    temperature: float = 0.0
    decode_algo: str = "threshold"
    decode_param: float | int = 0.9
    max_window_length: Size = 1_000_000_000
    cache_type: str = "none"
    refresh_count: Count = 16
    mask_id: Count | None = None
    pad_id: Count | None = None
    eos_id: Count | None = None
    lookahead: Count = 1


def dcd(line: Line, checkpoints: Checkpoints) -> Setup:
    """DCD's loop for models that see the whole canvas, with a window that slides or with fixed blocks."""
    args = line.arguments(DCDArguments)
    denoiser = Watched(checkpoints.load(line.model, args.mask_id, args.eos_id))
    if line.batched or args.temperature > 0:
        raise Unsupported("rows of a batch share one window in the published loop, and no order of draws is known")
    if args.pad_id not in (None, args.eos_id):
        raise Unsupported(f"pad_id {args.pad_id} is not the end token that is filled in here")
    slides, width = args.window_type == "sliding", args.max_window_length
    if slides and width < args.initial_window_length:
        raise Unsupported("the first window of the published loop is wider than max_window_length")
    blocks: Blocks = FixedBlocks(args.block_size)
    if slides:
        blocks = SlidingBlocks(args.initial_window_length, width, until_end=True)
    stop: Stop = FillStop() if slides else FillAtBlock()
    cache = _cache(args, denoiser.spec.shift and args.lookahead == 0)
    return _setup(denoiser, _rule(args), blocks, stop, cache, args.generate_length, compat=False)


def _rule(args: DCDArguments) -> Scheduler:
    if args.decode_algo == "threshold":
        return Threshold(float(args.decode_param))
    if args.decode_algo == "entropy_threshold":
        return EntropyThreshold(-float(args.decode_param))
    if args.decode_algo not in ("fixed", "entropy_fixed") or args.decode_param < 1:
        raise Unsupported(f"decode_algo {args.decode_algo} with {args.decode_param}")
    return StepQuota(int(args.decode_param), score="confidence" if args.decode_algo == "fixed" else "entropy")


def _cache(args: DCDArguments, short: bool) -> Cache:
    if args.cache_type == "none":
        return NoCache()
    kind = re.fullmatch(r"(prefix|dual)(?:-delay(\d+))?", args.cache_type)
    if kind is None:
        raise Unsupported(f"cache_type {args.cache_type} is unknown")
    anchor: Anchor = "window" if kind[2] is None else "last"
    around = int(kind[2] or 0)
    after = None if kind[1] == "prefix" else around
    return (WithoutLookahead if short else SlidingCache)(around, after, max(args.refresh_count, 1), anchor)


def _setup(
    denoiser: Watched, scheduler: Scheduler, blocks: Blocks, stop: object, cache: Cache, tokens: int, compat: bool
) -> Setup:
    sampler = Sampler(denoiser, scheduler=scheduler, blocks=blocks, stop=stop, cache=cache, compat=compat)
    counted = {"windows": denoiser.windows, "columns": denoiser.columns}
    return Setup(sampler, tokens, measured=denoiser, counted=counted)
