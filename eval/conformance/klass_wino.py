"""KLASS, WINO, and the entropy and margin baselines of PC-Sampler's repository."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler import select
from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.eval.conformance.builder import Checkpoints, Setup, Unsupported
from dllm_sampler.eval.conformance.dream import SCORES
from dllm_sampler.eval.conformance.lines import Line, Size
from dllm_sampler.eval.conformance.llada import Loop, setup
from dllm_sampler.eval.conformance.published import PublishedWino
from dllm_sampler.models.cfg import guided
from dllm_sampler.protocols import Carry, Denoiser, Traits
from dllm_sampler.schedulers.budget import block_steps, uniform_share
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.klass import Klass, Take

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
    kind = MostUncertain if args.alg == "entropy" else Klass
    scheduler = kind(
        args.steps,
        SCORES.get(args.alg, "confidence"),
        compat=True,
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
    return setup(line, args, _denoiser(line, checkpoints, args), AnyBlock(args.steps, score, compat=True))


@dataclass(frozen=True)
class MostUncertain(Klass):
    """KLASS's `alg=entropy` ranks by entropy itself. No plug-in to choose: it only shows what was published."""

    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """See `FixedSteps.rate`."""
        return -super().rate(canvas, query, readout)


@dataclass(frozen=True)
class AnyBlock(FixedSteps):
    """A block's fixed schedule spent on the best masks of the whole generation, as those two baselines do.

    With several blocks the schedules shrink and masks are left. No plug-in to choose: it only shows what was published.
    """

    @property
    def traits(self) -> Traits:
        """It asks and commits outside the block."""
        return replace(super().traits, whole=True, asks_block=False)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Every mask."""
        return Query.at(canvas, select.columns(canvas.masked, canvas.length - canvas.origin))

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        masks = torch.where(canvas.age == 0, canvas.noise_left(), carry[0])  # [B]
        steps = block_steps(canvas, self.steps)
        count = uniform_share(masks, steps, canvas.age)
        commit = select.top(self.rate(canvas, query, readout), canvas.masked.gather(1, query.positions), count)
        last = canvas.age + 1 >= steps
        return Edit(readout.token[:, 0], commit, hold=~last, leave=last), (masks, steps)


def _denoiser(line: Line, checkpoints: Checkpoints, args: Loop) -> Denoiser:
    return guided(checkpoints.load(line.model, args.mask_id), args.cfg_scale)
