"""LLaDA's published loops: the vanilla one and Fast-dLLM's two releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Blocks, Cache, Denoiser, Guide, Scheduler
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.guides import EndTokens, Temperature
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import PublishedFactor, PublishedFixedSteps
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size

CACHES: dict[str, type[Cache]] = {"none": NoCache, "prefix": PrefixCache, "dual": DualCache}
TINY_EOT = 253  # the traces' checkpoints have no tokenizer that could name their end-of-turn token


class Loop(BaseModel):
    """What every loop of LLaDA's kind takes, with the defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    block_length: Size = 128
    temperature: float = 0.0
    cfg_scale: float = 0.0
    mask_id: int | None = None

    @property
    def draws(self) -> bool:
        """Whether anything is left to chance."""
        return self.temperature > 0


class Arguments(Loop):
    """LLaDA's own and Fast-dLLM's. `cache` stands for a repository's one function per cache."""

    steps: Size = 128
    remasking: str = "low_confidence"
    threshold: float | None = None
    factor: float | None = None
    cache: Literal["none", "prefix", "dual"] = "none"
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    eos_id: int | None = None
    eot_id: int | None = None

    @property
    def draws(self) -> bool:
        """Ranks too may be drawn."""
        return super().draws or self.remasking == "random"


def vanilla(line: Line, checkpoints: Checkpoints) -> Setup:
    """LLaDA's own loop: every planned step is made, whether or not it has anything to commit."""
    args = line.arguments(Arguments)
    return _plain(line, checkpoints, args, PublishedFixedSteps(args.steps, _score(args)))


def fast_dllm(line: Line, checkpoints: Checkpoints) -> Setup:
    """Fast-dLLM: three caches by three rules. Blocks end as soon as they are full."""
    return _fast_dllm(line, checkpoints, line.arguments(Arguments), fine=True)


def fast_dllm_first(line: Line, checkpoints: Checkpoints) -> Setup:
    """Fast-dLLM's first release: its cached loops look whether a block is full only after the second forward."""
    args = line.arguments(Arguments)
    setup = _fast_dllm(line, checkpoints, args, fine=False)
    return replace(setup, wasted_block=args.block_length if args.cache != "none" else None)


def _fast_dllm(line: Line, checkpoints: Checkpoints, args: Arguments, fine: bool) -> Setup:
    scheduler: Scheduler
    if args.factor is not None:
        scheduler = PublishedFactor(args.factor)
    elif args.threshold is not None:
        scheduler = Threshold(args.threshold)
    else:
        scheduler = FixedSteps(args.steps, _score(args))
    if args.remasking != "low_confidence" and not isinstance(scheduler, FixedSteps):
        raise Unsupported(f"remasking {args.remasking} has no meaning under a threshold or factor")
    return replace(_plain(line, checkpoints, args, scheduler, fine), lockstep=args.block_length)


def _plain(line: Line, checkpoints: Checkpoints, args: Arguments, scheduler: Scheduler, fine: bool = False) -> Setup:
    denoiser = guided(checkpoints.load(line.model, args.mask_id), args.cfg_scale)
    guides = _guides(args, denoiser.spec)
    return setup(line, args, denoiser, scheduler, cache=CACHES[args.cache](), guides=guides, fine=fine)


def setup(
    line: Line,
    args: Loop,
    denoiser: Denoiser,
    scheduler: Scheduler,
    blocks: Blocks | None = None,
    stop: object = "none",
    cache: Cache | None = None,
    guides: list[Guide] | None = None,
    beyond: int = 0,
    fine: bool = False,
) -> Setup:
    """A loop of LLaDA's kind. Draws cover the whole row, noise goes into the choice of tokens alone.

    Args:
        beyond, fine: see `ReplayNoise`.

    Raises:
        Unsupported: a random run cannot be repeated.
    """
    cache = NoCache() if cache is None else cache
    if args.draws and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    if args.draws and cache.stores:
        raise Unsupported("a cached loop draws in an order that nothing here repeats")
    if guides is None:
        guides = [Temperature(value=args.temperature)] if args.temperature > 0 else []
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=FixedBlocks(args.block_length) if blocks is None else blocks,
        stop=stop,
        cache=cache,
        guide=guides,
        noise=ReplayNoise(line.rng.torch_manual_seed, "llada", beyond, fine) if line.rng else None,
        compat=True,
    )
    return Setup(sampler, args.gen_length)


def _score(args: Arguments) -> Literal["confidence", "random"]:
    if args.remasking not in ("low_confidence", "random"):
        raise Unsupported(f"remasking {args.remasking} is unknown")
    return "random" if args.remasking == "random" else "confidence"


def _guides(args: Arguments, spec: ModelSpec) -> list[Guide]:
    """End tokens around the temperature; confidence is that of the untempered logits."""
    eos = spec.eos_id if args.eos_id is None else args.eos_id
    eot = args.eot_id if args.eot_id is not None else TINY_EOT if spec.eot_id is None else spec.eot_id
    guides: list[Guide] = []
    if args.logits_eos_inf:
        guides.append(EndTokens("ban", (eos,)))
    if args.temperature > 0:
        guides.append(Temperature(value=args.temperature))
    if args.confidence_eos_eot_inf:
        # The published line means to hide both tokens from the confidence. It writes the end token's into the
        # *noisy* logits, which are the plain ones only at temperature 0.
        guides.append(EndTokens("defer", (eot,) if args.temperature > 0 else (eos, eot)))
    return guides
