"""DPad and Streaming-dLLM: Fast-dLLM's loops on a part of the masks behind the block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.dpad import DPadCache
from dllm_sampler.cache.streaming import StreamingCache
from dllm_sampler.core.protocols import Cache, Plan, Scheduler
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.published import ForcedFirst, PublishedDualCache, PublishedPrefixCache, SuffixDraws
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.streaming import StreamingThreshold
from dllm_sampler.schedulers.threshold import Threshold
from tests.conformance import tilted
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size
from tests.conformance.llada import CACHES, Loop

SHIFTED: dict[str, type[Cache]] = {**CACHES, "prefix": PublishedPrefixCache, "dual": PublishedDualCache}


class Arguments(Loop):
    """What both take, with the defaults. `cache` stands for a repository's one function per cache."""

    steps: Size = 128
    remasking: str = "low_confidence"
    alg: str = "confidence_threshold"
    threshold: float | None = None
    cache: Literal["none", "prefix", "dual"] = "none"


class DPadArguments(Arguments):
    """DPad's own."""

    dropout: Literal["gaussian", "uniform", "null"] | None = None
    sigma: float = 4.0
    scale: float = 2.0
    window: Size = 128
    preserved_tokens: Count = 0
    early_termination: bool = False


class StreamingArguments(Arguments):
    """Streaming-dLLM's own."""

    window_size: Count = 32
    confidence_alpha: float = 0.3


@dataclass(frozen=True)
class Watched(Measured):
    """Also takes down which columns behind it each block sees, counted from the first of the answer."""

    kept: list[list[int]] = field(default_factory=list)

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """See `Denoiser`."""
        if int(canvas.age) == 0:
            behind = plan.wanted.computed & (canvas.columns() >= canvas.stop[:, None])
            self.kept.append((behind[0].nonzero()[:, 0] - canvas.layout.first).tolist())
        return super().__call__(canvas, query, plan)


def dpad(line: Line, checkpoints: Checkpoints) -> Setup:
    """DPad: a random part of the masks behind the block, drawn when it opens."""
    args = line.arguments(DPadArguments)
    rule = FixedSteps(args.steps) if args.threshold is None else Threshold(args.threshold)
    stop = "block" if args.early_termination else "none"
    if args.dropout is None or args.dropout == "null":
        return _setup(line, checkpoints, args, rule, lambda inner: inner, stop)
    if line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    settings = args.dropout, args.window, args.sigma, args.scale, args.preserved_tokens
    return _setup(line, checkpoints, args, rule, lambda inner: DPadCache(inner, *settings), stop)


def streaming(line: Line, checkpoints: Checkpoints) -> Setup:
    """Streaming-dLLM: a window and the last mask; it always stops at an end token."""
    args = line.arguments(StreamingArguments)
    if args.cache != "prefix":
        raise Unsupported(f"the published loop with cache {args.cache} has neither the window nor the threshold")
    threshold = args.threshold
    rule = FixedSteps(args.steps) if threshold is None else StreamingThreshold(threshold, args.confidence_alpha)
    return _setup(line, checkpoints, args, rule, lambda inner: StreamingCache(inner, args.window_size), "block")


def _setup(
    line: Line, checkpoints: Checkpoints, args: Arguments, rule: Scheduler, around: Callable[[Cache], Cache], stop: str
) -> Setup:
    denoiser = Watched(checkpoints.load(line.model))
    spec = denoiser.spec
    if args.mask_id not in (None, spec.mask_id):
        raise Unsupported(f"mask_id {args.mask_id} is not the checkpoint's")
    if args.draws or args.cfg_scale:
        raise Unsupported("no record says in which order draws are made, and no published loop has guidance")
    if args.remasking != "low_confidence":
        raise Unsupported(f"remasking {args.remasking} is not repeated here")
    wasted = None
    if spec.shift:
        if args.threshold is None or args.alg != "confidence_threshold":
            raise Unsupported("Dream's loops are repeated with a threshold only")
        if args.cache != "none":  # they look for masks only behind a windowed forward
            rule, wasted = ForcedFirst(rule), 1
    sampler = Sampler(
        denoiser,
        scheduler=rule,
        blocks=FixedBlocks(args.block_length),
        stop=stop,
        cache=around((SHIFTED if spec.shift else CACHES)[args.cache]()),
        guide=tilted.guides(line),
        noise=SuffixDraws(line.rng.torch_manual_seed, "llada") if line.rng else None,
        compat=True,
    )
    ends = stop == "block"
    return Setup(
        sampler,
        args.gen_length,
        wasted_block=wasted,
        measured=denoiser,
        fill=spec.eos_id if ends else None,
        only_commits=ends,
        counted={"suffix_kept": denoiser.kept},
    )
