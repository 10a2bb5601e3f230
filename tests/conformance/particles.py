"""Self-rewarding SMC on LLaDA and Dream: rows of one prompt that are drawn again after each block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.core.around import Around
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Cache, Carry, Guide, Scheduler
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.guides import Temperature
from dllm_sampler.published import ForcedFirst, PrefixDraws, PublishedPrefixCache, PublishedSelfRewarding, RestDraws
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from tests.conformance import dream, llada
from tests.conformance.builder import Checkpoints, Measured, Unsupported
from tests.conformance.lines import Line, Size
from tests.conformance.lines import check as parsed

NEAR = 2e-3  # of sums of float32 logarithms


class Meeting(BaseModel):
    """A meeting after a block."""

    model_config = ConfigDict(strict=True, frozen=True)

    block: int
    log_w: list[float]
    ess: float
    ancestors: list[int] | None


class Run(BaseModel):
    """What a line records besides the output."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    particles: list[list[int]]
    winner: int
    log_p: list[float]
    blocks: list[Meeting]
    particle_steps: list[list[list[int]]]
    forward_shapes: list[tuple[int, int]] | None = None


class Arguments(llada.Arguments):
    """LLaDA's, and the number of rows."""

    num_particles: Size = 4


class DreamArguments(dream.Arguments):
    """Dream's, and the number of rows, which the code fixes."""

    num_particles: Size = 4


@dataclass(frozen=True)
class NotedCommits(Around):
    """Any scheduler, with a list of what each forward committed in each row."""

    steps: list[list[list[int]]] = field(default_factory=list, repr=False, compare=False)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = self.inner.tell(canvas, query, readout, carry)
        commit = edit.commit & canvas.eligible(query.positions) & ~canvas.done[:, None]
        at = query.positions - canvas.layout.first[:, None]
        self.steps.append([sorted(row[mine].tolist()) for row, mine in zip(at, commit, strict=True)])
        return edit, carry


def smc(line: Line, checkpoints: Checkpoints) -> Callable[[], str | None]:
    """SR-SMC on LLaDA, without a cache or with the prefix cache."""
    args = line.arguments(Arguments)
    if args.remasking != "low_confidence" or args.factor is not None:
        raise Unsupported("the published loop raises where remasking is random, or factor is set")
    cached, seed = line.system.endswith("cache"), _seed(line)
    noise = PrefixDraws(seed, "llada") if cached else ReplayNoise(seed, "llada")
    rule = FixedSteps(args.steps) if args.threshold is None else Threshold(args.threshold)
    guides: list[Guide] = [Temperature(value=args.temperature)] if args.temperature > 0 else []
    cache = PrefixCache() if cached else NoCache()
    return _task(line, checkpoints, args, args.gen_length, rule, cache, guides, noise)


def smc_dream(line: Line, checkpoints: Checkpoints) -> Callable[[], str | None]:
    """SR-SMC on Dream, which compares logarithms with the threshold and draws for all masks."""
    args = line.arguments(DreamArguments)
    if args.alg != dream.THRESHOLD or args.dual_cache or args.alg_temp:
        raise Unsupported("the published loop adds no weight there")
    rule = ForcedFirst(Threshold(math.exp(args.threshold)))
    noise = RestDraws(_seed(line), "dream")
    return _task(line, checkpoints, args, args.max_new_tokens, rule, PublishedPrefixCache(), args.guides, noise)


def _seed(line: Line) -> int:
    if line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    return line.rng.torch_manual_seed


def _task(
    line: Line,
    checkpoints: Checkpoints,
    args: Arguments | DreamArguments,
    new_tokens: int,
    rule: Scheduler,
    cache: Cache,
    guides: list[Guide],
    noise: ReplayNoise,
) -> Callable[[], str | None]:
    run = parsed(Run, line.model_extra or {}, line.where)
    denoiser, noted = Measured(checkpoints.load(line.model)), NotedCommits(rule)
    sampler = Sampler(
        denoiser,
        scheduler=noted,
        blocks=FixedBlocks(args.block_length),
        stop="none",
        cache=cache,
        guide=guides,
        particles=PublishedSelfRewarding(args.num_particles),
        noise=noise,
        compat=True,
    )

    def compare() -> str | None:
        result = sampler.generate([line.rows[0]], max_new_tokens=new_tokens)
        assert result.rows is not None
        rows = result.rows[0]
        steps = zip(noted.steps, run.particle_steps, strict=False)
        found: list[tuple[str, Any, Any]] = [(f"commits of forward {k}", *both) for k, both in enumerate(steps, 1)]
        for ours, block in zip(rows.meetings, run.blocks, strict=False):
            found += [
                (f"log_w of block {block.block}", _near(ours.log_weights, block.log_w), block.log_w),
                (f"ancestors of block {block.block}", ours.ancestors, block.ancestors),
                (f"ess of block {block.block}", *_close(ours.effective, block.ess)),
            ]
        found += [
            ("number of meetings", len(rows.meetings), len(run.blocks)),
            ("particles", rows.result.trace.decoded.tolist(), run.particles),
            ("log_p", _near(rows.ratings, run.log_p), run.log_p),
            ("winner", rows.winner, run.winner),
            ("output", result.trace.decoded[0].tolist(), line.output_ids),
            ("forwards", len(noted.steps), line.nfe),
        ]
        if run.forward_shapes is not None:
            found.append(("lengths", denoiser.lengths, [width for _, width in run.forward_shapes]))
        return next((f"{name} is {ours}, recorded {wanted}" for name, ours, wanted in found if ours != wanted), None)

    return compare


def _near(ours: list[float], wanted: list[float]) -> list[float]:
    """Return the recorded numbers if ours are near, else ours."""
    pairs = torch.tensor([ours, wanted], dtype=torch.float64)
    return wanted if bool(((pairs[0] - pairs[1]).abs() < NEAR).all()) else ours


def _close(ours: float, wanted: float) -> tuple[float, float]:
    return (wanted, wanted) if abs(ours - wanted) < NEAR * max(1.0, wanted) else (ours, wanted)
