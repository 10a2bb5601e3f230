"""The published loop of Stable-DiffCoder, `generate_block`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.guides import Temperature
from dllm_sampler.published import StopAt
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_tokens import with_finish
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size
from tests.conformance.llada import Loop


class Arguments(Loop):
    """What `generate_block` takes, with its defaults where the README gives none."""

    steps: Size = 128
    block_length: Size = 4
    threshold: float | None = 0.95
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    shift: bool = False
    eos_id: Count


@dataclass(frozen=True)
class StepsPerBlock(FixedSteps):
    """`FixedSteps` whose `steps` are those of each block: a short one has as many as a whole one."""

    @property
    @override
    def total_steps(self) -> None:
        return None

    @override
    def count(self, canvas: Canvas, carry: Carry) -> tuple[Tensor, Carry]:
        left = canvas.noise_left()
        masks, steps = torch.where(canvas.age == 0, left, carry[0]), torch.full_like(left, self.steps or 1)
        return self.share(canvas, masks, steps, left), (masks, steps)


@dataclass(frozen=True)
class StopWhenFull(StopAt):
    """`StopAt` before the forward that would store the block."""

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        ended = (self.ends(after) & canvas.in_block()).any(1)
        return with_finish(edit, (after.noise_left() == 0) & ended)


@dataclass(frozen=True)
class BlockDraws(ReplayNoise):
    """Draws that cover the block from its first column on, prompt included, in forwards that predict something."""

    layout: Literal["dream", "llada", "sdar"] = "llada"

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        first, width = self._block(canvas)
        if not bool((positions < canvas.length).any()):
            return torch.zeros(*positions.shape, vocab, device=positions.device)
        drawn = torch.rand((width, vocab), dtype=torch.float64, generator=self.generator)
        at = (positions.cpu() - first).clamp(max=width - 1)
        return -torch.log(-torch.log(drawn))[at].to(positions.device)

    @override
    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        first, width = self._block(canvas)
        if not bool((positions < canvas.length).any()):
            return torch.ones(positions.shape, device=positions.device)
        drawn = torch.rand(width, generator=self.generator)
        return drawn[(positions.cpu() - first).clamp(max=width - 1)].to(positions.device)

    @staticmethod
    def _block(canvas: Canvas) -> tuple[int, int]:
        """First column and number of columns of the one row's block; the canvas cuts the last one."""
        first = int(canvas.grid_start())
        return first, int(canvas.stop) - first


def generate_block(line: Line, checkpoints: Checkpoints) -> Setup:
    """The loop; what it returns behind the first end token is end tokens, up to the end of the block."""
    args = line.arguments(Arguments)
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    if args.shift:
        raise Unsupported("shift=True, where the first row predicts its own mask, is a slip of the published loop")
    blocks = args.gen_length // args.block_length
    if args.gen_length % args.block_length or args.steps % blocks:
        raise Unsupported(f"{args.gen_length} tokens in {args.steps} steps do not make blocks of {args.block_length}")
    random = args.remasking == "random"
    if (random or args.draws) and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    scheduler: Scheduler = StepsPerBlock(args.steps // blocks, "random" if random else "confidence")
    if args.threshold is not None:
        if args.steps < args.gen_length or random:
            raise Unsupported("a threshold that the number of steps bounds, or with random ranks, leaves masks")
        scheduler = Threshold(args.threshold)
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id, args.eos_id),
        scheduler=scheduler,
        blocks=FixedBlocks(args.block_length),
        stop=StopWhenFull((args.eos_id,)),
        cache=BlockCausalCache("separate"),
        guide=[Temperature(value=args.temperature)] if args.draws else [],
        noise=BlockDraws(line.rng.torch_manual_seed) if line.rng else None,
        compat=True,
    )
    return Setup(sampler, args.gen_length, only_commits=True, ends=(args.eos_id,), pad=args.eos_id)
