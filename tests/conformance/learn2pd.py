"""Learn2PD's published loops, without and with End-of-Text prediction, and their cached versions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Stop
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import PublishedCachedEndOfText, PublishedEndOfText, PublishedLearnedFilter
from dllm_sampler.sampler import Sampler
from dllm_sampler.stops.end_tokens import NoStop
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size
from tests.conformance.llada import CACHES


class Arguments(BaseModel):
    """The arguments of the loops, with their defaults. `cache` names the repository's one function per cache."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    block_length: Size = 32
    steps: Size = 128
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    mask_id: int | None = None
    eos_id: int | None = None
    accept_thres: float
    filter_weights: str
    cache: Literal["none", "prefix", "dual"] = "none"


def plain(line: Line, checkpoints: Checkpoints) -> Setup:
    """The filter alone."""
    return _setup(line, checkpoints, line.arguments(Arguments), NoStop())


def end_of_text(line: Line, checkpoints: Checkpoints) -> Setup:
    """With the code's rule for the end of text: any candidate will do, however unsure; under a cache, of the block."""
    args = line.arguments(Arguments)
    stop = PublishedEndOfText() if args.cache == "none" else PublishedCachedEndOfText()
    return _setup(line, checkpoints, args, stop)


def _setup(line: Line, checkpoints: Checkpoints, args: Arguments, stop: Stop) -> Setup:
    denoiser = checkpoints.load(line.model, args.mask_id, args.eos_id)
    if args.temperature > 0:
        raise Unsupported("no order of draws is known for this loop")
    if args.remasking != "low_confidence":
        raise Unsupported(f"remasking {args.remasking} draws in an order that is not known for this loop")
    path: Path = checkpoints.folder / "traces" / args.filter_weights
    sampler = Sampler(
        guided(denoiser, args.cfg_scale),
        scheduler=PublishedLearnedFilter(str(path), args.accept_thres, args.steps),
        blocks=FixedBlocks(args.block_length),
        stop=stop,
        cache=CACHES[args.cache](),
        compat=True,
    )
    return Setup(sampler, args.gen_length)
