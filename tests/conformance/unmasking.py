"""LocalLeap, dParallel, EOSER and ASS, PC-Sampler, EB-Sampler, Prophet and AdaBlock."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dllm_sampler.blocks.adablock import AdaBlock
from dllm_sampler.blocks.ascending import AscendingBlocks
from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.protocols import Denoiser, Scheduler
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import (
    AmongTop,
    ForcedFirst,
    PublishedDualCache,
    PublishedFixedSteps,
    PublishedLocalLeap,
    PublishedPositionCalibrated,
)
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.ascending import AscendingSteps
from dllm_sampler.schedulers.entropy import EntropyThreshold
from dllm_sampler.schedulers.entropy_bound import EntropyBound
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.prophet import Prophet
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size
from tests.conformance.llada import CACHES, Loop, setup

# What AdaBlock's Dream path takes for delimiters: every token that holds a newline or ends a sentence.
DREAM_DELIMITERS = (
    *(198, 271, 280, 319, 340, 382, 401, 532, 624, 630, 692, 698, 921, 1248, 1837, 1939, 2219, 2533, 3276, 3876),
    *(4894, 5267, 14750, 68327),
)


class Arguments(Loop):
    """What most of these loops take, with their defaults."""

    steps: Size = 128
    remasking: str = "low_confidence"


class LeapArguments(Arguments):
    """LocalLeap's own; no threshold is a fixed schedule, no relaxed one plain threshold decoding."""

    threshold: float | None = None
    relaxed_threshold: float | None = None
    radius: int = 4
    eos_id: int | None = None
    early_stop: bool = False


class EntropyArguments(Arguments):
    """dParallel's own: a bound on the entropy, whatever its name. `cache` as for Fast-dLLM."""

    threshold: float | None = None
    cache: Literal["none", "prefix", "dual"] = "none"


class EoserArguments(Arguments):
    """EOSER's own."""

    eos_min_gamma: float = 0.4
    eos_max_gamma: float = 1.0
    eos_token_id: int | None = None


class AscendingArguments(EoserArguments):
    """ASS's own, with and without EOSER."""

    block_num: Size = 4
    eos_min_gamma: float = 0.01


class CalibratedArguments(Arguments):
    """PC-Sampler's own; the table's file is recorded with the published arguments."""

    lambd: float = 1
    alpha: float = 1
    freq_table: str


class BoundArguments(Arguments):
    """EB-Sampler's own."""

    gamma: float = 0.1


class Gaps(BaseModel):
    """Prophet's bounds."""

    model_config = ConfigDict(strict=True, frozen=True)

    early: float = 7.5
    mid: float = 5.0
    late: float = 2.5


class ProphetArguments(Arguments):
    """Prophet's own."""

    answer_start_pos: int | None = None
    answer_length: Size = 5
    analyze_gap: bool = True
    early_exit_thresholds: Gaps = Gaps()


class AdaArguments(Arguments):
    """AdaBlock's own for LLaDA; without a delimiter threshold blocks are fixed."""

    init_block_length: Size
    threshold: float
    delimiter_ids: list[int] = Field(default=[198])
    delimiter_threshold: float | None = None
    cache: Literal["none", "prefix", "dual"] = "none"


class DreamArguments(BaseModel):
    """AdaBlock's own for Dream."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    alg: str
    steps: Size | None = None  # without effect: blocks run until they are full
    block_length: Size = 8
    threshold: float = 0.9
    delimiter_threshold: float = 0.3
    temperature: float | None = 0.0
    top_k: Size | None = 50  # see `dream.Arguments`
    top_p: float | None = None
    dual_cache: bool = False
    mask_token_id: int | None = None


def localleap(line: Line, checkpoints: Checkpoints) -> Setup:
    """LocalLeap's loop; after `early_stop` end tokens fill what lies behind."""
    args = line.arguments(LeapArguments)
    scheduler: Scheduler = FixedSteps(args.steps)
    if args.threshold is not None:
        scheduler = Threshold(args.threshold)
        if args.relaxed_threshold is not None:
            scheduler = PublishedLocalLeap(args.threshold, args.relaxed_threshold, args.radius)
    denoiser = _denoiser(line, checkpoints, args, args.eos_id)
    made = setup(line, args, denoiser, scheduler, stop="block" if args.early_stop else "none")
    return replace(made, fill=denoiser.spec.eos_id if args.early_stop else None)


def dparallel(line: Line, checkpoints: Checkpoints) -> Setup:
    """dParallel's loops: the cached ones are Fast-dLLM's first release, and rank a fixed schedule by entropy."""
    args = line.arguments(EntropyArguments)
    cached = args.cache != "none"
    fixed = FixedSteps(args.steps, "entropy" if cached else "confidence")
    scheduler = fixed if args.threshold is None else EntropyThreshold(args.threshold)
    made = setup(line, args, _denoiser(line, checkpoints, args), scheduler, cache=CACHES[args.cache]())
    return replace(made, wasted_block=args.block_length if cached else None)


def eoser(line: Line, checkpoints: Checkpoints) -> Setup:
    """EOSER in fixed steps, as many in each block: what does not divide is dropped."""
    args = line.arguments(EoserArguments)
    blocks = max(1, args.gen_length // args.block_length)
    inner = PublishedFixedSteps(max(1, args.steps // blocks) * blocks)
    scheduler = Eoser(inner, args.eos_min_gamma, args.eos_max_gamma, "step", args.steps)
    return setup(line, args, _greedy(line, checkpoints, args, args.eos_token_id), scheduler)


def ascending(line: Line, checkpoints: Checkpoints) -> Setup:
    """ASS, and EOSER with it."""
    args = line.arguments(AscendingArguments)
    scheduler: Scheduler = AscendingSteps()
    if line.system.startswith("eoser"):
        scheduler = Eoser(scheduler, args.eos_min_gamma, args.eos_max_gamma, "ascending", args.steps)
    if args.steps != args.gen_length.bit_length() - 1:
        raise Unsupported(f"{args.steps} steps are not log2 of {args.gen_length}, rounded down")
    blocks = FullBlock() if args.block_num == 1 else AscendingBlocks(args.block_num)
    return setup(line, args, _greedy(line, checkpoints, args, args.eos_token_id), scheduler, blocks)


def calibrated(line: Line, checkpoints: Checkpoints) -> Setup:
    """PC-Sampler's loop."""
    args = line.arguments(CalibratedArguments)
    table = str(checkpoints.folder / "traces" / args.freq_table)
    scheduler = PublishedPositionCalibrated(args.steps, frequency=table, decay=args.lambd, alpha=args.alpha)
    return setup(line, args, _denoiser(line, checkpoints, args), scheduler)


def entropy_bound(line: Line, checkpoints: Checkpoints) -> Setup:
    """The EB-Sampler of PC-Sampler's repository: one block."""
    args = line.arguments(BoundArguments)
    return setup(line, args, _denoiser(line, checkpoints, args), EntropyBound(args.gamma), FullBlock())


def prophet(line: Line, checkpoints: Checkpoints) -> Setup:
    """Prophet around LLaDA's loop; without an answer's start it never exits."""
    args = line.arguments(ProphetArguments)
    gaps, stop = args.early_exit_thresholds, None
    if args.answer_start_pos is not None and args.analyze_gap:
        start = args.answer_start_pos - len(line.prompts[0])
        stop = Prophet(start, args.answer_length, gaps.early, gaps.mid, gaps.late, args.steps)
    return setup(line, args, _denoiser(line, checkpoints, args), PublishedFixedSteps(args.steps), stop=stop or "none")


def adablock(line: Line, checkpoints: Checkpoints) -> Setup:
    """AdaBlock for LLaDA."""
    args = line.arguments(AdaArguments)
    bound = float("inf") if args.delimiter_threshold is None else args.delimiter_threshold
    blocks = AdaBlock(tuple(args.delimiter_ids), bound, args.init_block_length)
    denoiser = _greedy(line, checkpoints, args)
    return setup(line, args, denoiser, Threshold(args.threshold), blocks, cache=CACHES[args.cache]())


def adablock_dream(line: Line, checkpoints: Checkpoints) -> Setup:
    """AdaBlock for Dream, whose cached loop commits each block's first position by force."""
    args = line.arguments(DreamArguments)
    if args.alg != "confidence_threshold":
        raise Unsupported(f"alg {args.alg} is unknown")
    if args.temperature:
        raise Unsupported("no order of draws is known for this loop")
    denoiser = checkpoints.load(line.model, args.mask_token_id)
    scheduler: Scheduler = Threshold(args.threshold)
    if args.top_k is not None or args.top_p is not None:
        scheduler = AmongTop(scheduler, args.top_k, 1.0 if args.top_p is None else args.top_p)
    sampler = Sampler(
        denoiser,
        scheduler=ForcedFirst(scheduler) if args.dual_cache else scheduler,
        blocks=AdaBlock(DREAM_DELIMITERS, args.delimiter_threshold, args.block_length),
        stop="none",
        cache=PublishedDualCache() if args.dual_cache else NoCache(),
        compat=True,
    )
    return Setup(sampler, args.max_new_tokens)


def _greedy(line: Line, checkpoints: Checkpoints, args: Arguments, eos: int | None = None) -> Denoiser:
    if args.draws:
        raise Unsupported("no order of draws is known for this loop")
    return _denoiser(line, checkpoints, args, eos)


def _denoiser(line: Line, checkpoints: Checkpoints, args: Arguments, eos: int | None = None) -> Denoiser:
    denoiser = checkpoints.load(line.model, args.mask_id, eos)
    if args.remasking != "low_confidence":
        raise Unsupported(f"remasking {args.remasking} draws in an order that is not known for this loop")
    return guided(denoiser, args.cfg_scale)
