"""KLASS, WINO, and the entropy and margin baselines of PC-Sampler's repository."""

from __future__ import annotations

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.models.cfg import guided
from dllm_sampler.published import AnyBlock, MostUncertain, PublishedKlass, PublishedWino
from dllm_sampler.schedulers.klass import Take
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.dream import SCORES
from tests.conformance.lines import Line, Size
from tests.conformance.llada import Loop, setup

TAKES: dict[str, Take] = {"all": "all", "max_conf": "surest", "min_kl": "steadiest"}


class KlassArguments(Loop):
    """KLASS's own. The published function ignores its `mask_id`."""

    steps: Size = 128
    alg: str = "default"
    conf_threshold: float = 0.9
    kl_threshold: float = 0.01
    kl_history_length: Size = 2
    unmask_strategy: str = "all"  # and so is any name but two


class WinoArguments(Loop):
    """WINO's own."""

    threshold: float = 0.6
    threshold_back: float = 0.9


class BaselineArguments(Loop):
    """The baselines' own; `remasking` has no effect."""

    steps: Size = 128
    remasking: str = "low_confidence"


def klass(line: Line, checkpoints: Checkpoints) -> Setup:
    """KLASS's loop. Every `alg` but its own is the fallback alone, which no divergence below 0 leaves."""
    args = line.arguments(KlassArguments)
    if args.alg == "random":
        raise Unsupported("alg random draws in an order that nothing here repeats")
    if args.temperature > 0:
        raise Unsupported("a temperature's noise goes into the published code's probabilities too")
    kind = MostUncertain if args.alg == "entropy" else PublishedKlass
    scheduler = kind(
        args.steps,
        SCORES.get(args.alg, "confidence"),
        threshold=args.conf_threshold,
        divergence=args.kl_threshold if args.alg == "klass" else 0.0,
        history=args.kl_history_length,
        take=TAKES.get(args.unmask_strategy, "all"),
    )
    return setup(line, args, _denoiser(line, checkpoints, args), scheduler)


def wino(line: Line, checkpoints: Checkpoints) -> Setup:
    """WINO's loop, which draws for its shadow rows too."""
    args = line.arguments(WinoArguments)
    scheduler = PublishedWino(args.threshold, args.threshold_back)
    return setup(line, args, _denoiser(line, checkpoints, args), scheduler, beyond=args.block_length)


def baseline(line: Line, checkpoints: Checkpoints) -> Setup:
    """`pcs-entropy` and `pcs-margin`."""
    args = line.arguments(BaselineArguments)
    score = "entropy" if line.system.endswith("entropy") else "margin"
    return setup(line, args, _denoiser(line, checkpoints, args), AnyBlock(args.steps, score))


def _denoiser(line: Line, checkpoints: Checkpoints, args: Loop) -> Denoiser:
    return guided(checkpoints.load(line.model, args.mask_id), args.cfg_scale)
