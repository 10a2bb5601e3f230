"""dInfer's block runner with its three decoders and its two caches."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.periodic import PeriodicDual, PeriodicPrefix
from dllm_sampler.core.protocols import Cache, Scheduler
from dllm_sampler.published import PublishedCredit, PublishedDInferThreshold, Unrolled
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.hierarchical import Hierarchical
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size


class Arguments(BaseModel):
    """What runner, decoders and cache factory take, with their defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size
    block_length: Size
    decoder: Literal["threshold", "hierarchy", "credit"]
    mask_id: int | None = None
    eos_id: int | None = None
    temperature: float = 0.0
    threshold: float | None = None
    low_threshold: float | None = 0.4
    credit_alpha: float = 0.7
    boost_gamma: float = 0.2
    decay_beta: float = 0.8
    use_float64: bool = False  # a finer confidence of the same rule; ours is always fine
    maximum_unroll: Size = 4
    expected_tpf: Size = 8
    early_stop: bool = True
    cache_type: Literal["prefix", "dual"] | None = None
    cache_update_freq: Size | None = None


def dinfer(line: Line, checkpoints: Checkpoints) -> Setup:
    """A run ends with the block that holds an end token; with `early_stop`, end tokens fill what lies behind."""
    args = line.arguments(Arguments)
    if line.batched:
        raise Unsupported("the rows of a batch wait for one another, and share the steps that are unrolled")
    denoiser = checkpoints.load(line.model, args.mask_id, args.eos_id)
    if args.temperature > 0:
        raise Unsupported("no order of draws is known for this loop")
    every, cached = args.cache_update_freq, args.cache_type is not None
    cache: Cache = NoCache()
    if args.cache_type is not None:
        cache = {"prefix": PeriodicPrefix, "dual": PeriodicDual}[args.cache_type](every=every)
    sampler = Sampler(
        denoiser,
        scheduler=Unrolled(_decoder(args), args.expected_tpf, args.maximum_unroll, cached, every),
        blocks=FixedBlocks(args.block_length),
        stop="block",
        cache=cache,
        compat=True,
    )
    return Setup(sampler, args.gen_length, fill=denoiser.spec.eos_id if args.early_stop else None)


def _decoder(args: Arguments) -> Scheduler:
    if args.decoder == "hierarchy":
        return Hierarchical(args.low_threshold or 0.0, args.threshold)
    threshold = float("inf") if args.threshold is None else args.threshold
    if args.decoder == "threshold":
        return PublishedDInferThreshold(threshold)
    # The published matrix forgets no token: remember as many as there are forwards.
    credit = {"alpha": args.credit_alpha, "gamma": args.boost_gamma, "decay": args.decay_beta}
    return PublishedCredit(threshold, memory=args.gen_length, **credit)
