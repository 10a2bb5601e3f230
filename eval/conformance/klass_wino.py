"""KLASS, WINO, and the entropy and margin baselines of PC-Sampler's repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from dllm_sampler import select
from dllm_sampler.blocks import FixedBlocks
from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.eval.conformance.builder import Checkpoints, Setup, Unsupported
from dllm_sampler.eval.conformance.lines import Line, Size
from dllm_sampler.models.cfg import guided
from dllm_sampler.protocols import Carry, Scheduler
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.budget import block_steps, uniform_share
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.klass import Klass, Take
from dllm_sampler.schedulers.wino import Wino

TAKES: dict[str, Take] = {"all": "all", "max_conf": "surest", "min_kl": "steadiest"}


class Arguments(BaseModel):
    """What all three take, with their defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size = 128
    block_length: Size = 128
    temperature: float = 0.0
    cfg_scale: float = 0.0
    mask_id: int | None = None


class KlassArguments(Arguments):
    """KLASS's own. The published function ignores its `mask_id`."""

    steps: Size = 128
    alg: str = "klass"
    conf_threshold: float = 0.9
    kl_threshold: float = 0.01
    kl_history_length: Size = 2
    unmask_strategy: Literal["all", "max_conf", "min_kl"] = "all"


class WinoArguments(Arguments):
    """WINO's own."""

    threshold: float = 0.6
    threshold_back: float = 0.9


class BaselineArguments(Arguments):
    """The baselines' own; `remasking` has no effect."""

    steps: Size = 128
    remasking: str = "low_confidence"


def klass(line: Line, checkpoints: Checkpoints) -> Setup:
    """KLASS's loop, whose other values of `alg` use its fallback alone."""
    args = line.arguments(KlassArguments)
    if args.alg != "klass":
        raise Unsupported(f"alg {args.alg} is not KLASS")
    scheduler = Klass(
        args.steps,
        compat=True,
        threshold=args.conf_threshold,
        divergence=args.kl_threshold,
        history=args.kl_history_length,
        take=TAKES[args.unmask_strategy],
    )
    return _setup(line, checkpoints, args, scheduler)


def wino(line: Line, checkpoints: Checkpoints) -> Setup:
    """WINO's loop."""
    args = line.arguments(WinoArguments)
    return _setup(line, checkpoints, args, Wino(args.threshold, args.threshold_back, compat=True))


def baseline(line: Line, checkpoints: Checkpoints) -> Setup:
    """`pcs-entropy` and `pcs-margin`."""
    args = line.arguments(BaselineArguments)
    score = "entropy" if line.system.endswith("entropy") else "margin"
    return _setup(line, checkpoints, args, AnyBlock(args.steps, score, compat=True))


@dataclass(frozen=True)
class AnyBlock(FixedSteps):
    """A block's fixed schedule spent on the best masks of the whole generation, as those two baselines do.

    With several blocks the schedules shrink and masks are left. No plug-in to choose: it only shows what was published.
    """

    @property
    def whole(self) -> bool:
        """It commits outside the block."""
        return True

    def ask(self, canvas: Canvas, width: int, carry: Carry) -> Query:
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


def _setup(line: Line, checkpoints: Checkpoints, args: Arguments, scheduler: Scheduler) -> Setup:
    denoiser = checkpoints.load(line.model, args.mask_id)
    if args.temperature > 0:
        raise Unsupported("no order of draws is known for this loop")
    sampler = Sampler(
        guided(denoiser, args.cfg_scale),
        scheduler=scheduler,
        blocks=FixedBlocks(args.block_length),
        stop="none",
        cache="none",
        compat=True,
    )
    return Setup(sampler, args.gen_length)
