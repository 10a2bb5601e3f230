"""Published loops whose point is a cache: dKV-Cache (LLaDA and Dream) and dLLM-Cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.dkv import DelayedCache
from dllm_sampler.cache.dkv_greedy import GreedyCache
from dllm_sampler.cache.dllm_cache import IntervalCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache, Scheduler
from dllm_sampler.core.values import Canvas
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import PublishedDelayedCache, PublishedFixedSteps
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.random_order import RandomOrder
from tests.conformance import dream
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Line, Size


class Arguments(BaseModel):
    """What the published LLaDA loops take, with their defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    block_length: Size = 128
    steps: Size = 128
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    mask_id: int | None = None
    enable_cache: bool = False
    cache_reloading_step: Size = 1
    window_size: int = 0


def dkv_decode(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA under dKV-Cache-Decode: fixed steps by confidence."""
    args = line.arguments(Arguments)
    if args.remasking != "low_confidence":
        raise Unsupported(f"remasking {args.remasking} is not dKV-Cache-Decode's")
    cache = DelayedCache(args.cache_reloading_step) if args.enable_cache else NoCache()
    return _setup(line, checkpoints, args, PublishedFixedSteps(args.steps), cache)


def dkv_greedy(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA under dKV-Cache-Greedy: the order of each block is drawn when it opens, and recorded."""
    args = line.arguments(Arguments)
    if args.remasking != "random":
        raise Unsupported(f"remasking {args.remasking}: the published code knows random order only")
    if args.steps > args.gen_length:
        raise Unsupported("more steps than tokens: the published loop makes forwards that commit nothing")
    cache = GreedyCache(args.cache_reloading_step, args.window_size) if args.enable_cache else NoCache()
    return _setup(line, checkpoints, args, RandomOrder(args.steps), cache, RecordedOrder.of(line))


class _DLLM(Arguments):
    prompt_interval_steps: Size = 1
    gen_interval_steps: Size = 1
    transfer_ratio: float = 0.0
    cfg_interval_steps: Size = 1


def dllm_cache(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA under dLLM-Cache. Guidance's branches are forwards of their own, and the second is not always made."""
    args = line.arguments(_DLLM)
    if args.remasking != "low_confidence":
        raise Unsupported(f"remasking {args.remasking} draws in no published order")
    every = args.cfg_interval_steps
    cache = IntervalCache(args.prompt_interval_steps, args.gen_interval_steps, args.transfer_ratio, every)
    setup = _setup(line, checkpoints, args, PublishedFixedSteps(args.steps), cache)
    doubled = (lambda step: step < 5 or step % every == 0) if args.cfg_scale > 0 else None
    return replace(setup, measured=None, guided=doubled)  # its forwards take every position, whatever they compute


class _Dream(dream.Arguments):
    use_cache: bool = False
    cache_type: Literal["decoded", "prefill", "pd"] = "decoded"
    cache_steps: int = 4
    shift_type: str = "un"


def dkv_dream(line: Line, checkpoints: Checkpoints) -> Setup:
    """Dream under dKV-Cache: `diffusion_generate` as it is, with fewer rows computed."""
    args = line.arguments(_Dream)
    if args.shift_type not in ("un", "un_right"):
        raise Unsupported(f"shift_type {args.shift_type} loses rows that masks need")
    mode = "decode" if args.cache_type == "decoded" else args.cache_type
    # Prefill never refreshes, and its lines leave the interval at 0.
    every = None if mode == "prefill" else args.cache_steps
    cache = PublishedDelayedCache(every, mode, False, args.shift_type) if args.use_cache else NoCache()
    return dream.steps(line, checkpoints, args, cache)


@dataclass(frozen=True)
class RecordedOrder(CounterNoise):
    """Uniform numbers that visit each block's positions in a recorded order, the highest first."""

    places: tuple[int, ...] = ()  # of each generated position
    origin: int = 0

    @staticmethod
    def of(line: Line) -> RecordedOrder:
        """The order of a line's `orders`: one list of positions per block.

        Raises:
            Unsupported: it has none, or they do not name each position once.
        """
        orders = (line.model_extra or {}).get("orders")
        flat = [position for block in orders or [] for position in block]
        if not flat or sorted(flat) != list(range(len(flat))):
            raise Unsupported("random order without the recorded orders cannot be repeated")
        places = [0] * len(flat)
        for place, position in enumerate(flat):
            places[position] = place
        return RecordedOrder(tuple(places), len(line.prompts[0]))

    @override
    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        place = torch.tensor((*([0] * self.origin), *self.places, 0), dtype=torch.float64)
        return 1 - (place[positions] + 0.5) / len(place)


def _setup(
    line: Line,
    checkpoints: Checkpoints,
    args: Arguments,
    scheduler: Scheduler,
    cache: Cache,
    noise: CounterNoise | None = None,
) -> Setup:
    denoiser = Measured(guided(checkpoints.load(line.model), args.cfg_scale))
    if args.mask_id not in (None, denoiser.spec.mask_id):
        raise Unsupported(f"mask_id {args.mask_id} is not the checkpoint's")
    if args.temperature > 0:
        raise Unsupported("no order of draws is published for a cached loop")
    if args.cfg_scale > 0 and not isinstance(cache, IntervalCache):
        raise Unsupported("the published loop has no guidance")
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=FixedBlocks(args.block_length),
        stop="none",
        cache=cache,
        noise=noise,
        compat=True,
    )
    return Setup(sampler, args.gen_length, measured=denoiser)
