"""CCD by the paper: predictions averaged over the last steps' contexts."""

from dataclasses import dataclass, field
from math import inf
from typing import Self

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.select import rank, top
from dllm_sampler.core.spec import Traits, with_bound_fields
from dllm_sampler.core.statistics import entropy
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import SharedSteps, even_share


@dataclass(frozen=True)
class CoherentMarginal(SharedSteps, Scheduler):
    """Coherent contextual decoding by the paper: predictions are averaged over the contexts of the last steps.

        while masks remain in the block:
            p, token, entropy = model(canvas)
            remember p at the buffer masks with the lowest entropy
            mean = average of p over the last depth steps, where all remember it
            n = number of masks due in this step, by steps
            if dynamic:  commit the masks with entropy(mean) <= epsilon,
                or else the n masks with the lowest entropy
            else:        commit the n masks with the lowest entropy(mean),
                and if these are fewer, others with the lowest entropy

    Source: CCD and CCD-DS, arXiv 2512.02044, section on the context marginal. The paper leaves `epsilon` open, and what
    is committed where too few masks have an average.

    Args:
        dynamic: commit all averaged positions up to `epsilon` (CCD-DS). False commits the step's share (CCD).
        steps: forwards for the whole generation. By default one per token.
        depth: steps averaged over, this one included.
        buffer: positions kept per step.
        epsilon: bound in nats on the entropy of the average. 0.325 is the entropy of the distribution (0.9, 0.1).
    """

    dynamic: bool = True
    steps: int | None = None
    depth: int = 3
    buffer: int = 4
    epsilon: float = 0.325
    vocab: int = field(init=False, default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)
        check_count("scheduler.depth", self.depth)
        check_count("scheduler.buffer", self.buffer)
        check_number("scheduler.epsilon", self.epsilon, "a number of nats", least=-inf)

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the size of the vocabulary."""
        return with_bound_fields(self, vocab=context.spec.vocab_size)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(ranks_by_confidence=False, scheduled=True)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"probabilities", "entropy"})

    def init(self, canvas: Canvas) -> Carry:
        """Return columns `[B, N]`, predictions `[B, N, V]` and the schedule. N = (depth - 1) * buffer, newest first."""
        shape = (canvas.start.shape[0], (self.depth - 1) * self.buffer)
        columns = torch.full(shape, canvas.length, device=canvas.ids.device)
        one = torch.ones_like(canvas.start)
        return columns, torch.zeros(*shape, self.vocab, device=columns.device), (one, one)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None and readout.entropy is not None
        score, eligible = -readout.entropy[:, 0], canvas.eligible(query.positions)  # [B, Q]
        buffer = self.buffer
        # Places 0 to buffer - 1 hold the lowest entropies. One more takes the rest.
        place = rank(score, eligible).masked_fill(~eligible, buffer).clamp(max=buffer)
        order = torch.arange(place.numel(), device=place.device).view_as(place)  # rows of [B * Q, V]
        index = order[:, :1].repeat(1, buffer + 1).scatter(1, place, order)[:, :buffer]
        there = torch.arange(buffer, device=place.device) < eligible.sum(1)[:, None]  # [B, buffer]
        columns = query.positions.flatten()[index].masked_fill(~there, canvas.length)
        rows = readout.probabilities.flatten(0, 2).index_select(0, index.flatten())
        now = rows.view(*index.shape, self.vocab).to(carry[1].dtype)  # [B, buffer, V]

        old, then = carry[0].masked_fill((canvas.age == 0)[:, None], canvas.length), carry[1]
        same = (columns[..., None] == old[:, None]) & there[..., None]  # [B, buffer, (depth-1) buffer]
        averaged = there & (same.sum(-1) == self.depth - 1)
        mean = torch.baddbmm(now, same.to(then.dtype), then).div_(self.depth)
        marginal = entropy(mean).masked_fill(~averaged, torch.inf)  # [B, buffer]
        marginal = torch.cat([marginal, torch.full_like(marginal[:, :1], torch.inf)], 1).gather(1, place)  # [B, Q]

        share, plan = even_share(canvas, self.steps, carry[2])
        if self.dynamic:
            chosen = marginal <= self.epsilon
            missing = torch.where(chosen.any(1), 0, share)
        else:
            chosen = top(-marginal, marginal < torch.inf, share)
            missing = share - chosen.sum(1)
        commit = chosen | top(score, eligible & ~chosen, missing)
        kept = (self.depth - 1) * buffer
        history = torch.cat([columns, old], 1)[:, :kept], torch.cat([now, then], 1)[:, :kept]
        return Edit(readout.token[:, 0], commit & eligible), (*history, plan)
