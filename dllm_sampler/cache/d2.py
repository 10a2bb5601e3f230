"""d2Cache: each step computes the masks that are likely to be committed next, and the columns most looked at."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, PaddedPlan, put, take, written
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count, check_positive, check_share
from dllm_sampler.core.density import density
from dllm_sampler.core.protocols import LayerParts, Plan
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass
class D2Cache(BaseCache):
    """d2Cache: each forward computes the masks with the best scores and the columns with the most attention.

        computes   the best masks, the last commits, and the columns most looked at
        reuses     all other positions, as they were last computed
        refreshes  nothing else, after a first forward of everything

    Source: d2Cache, arXiv 2509.23094, which decodes by `scheduler=certainty`. A mask is scored by its last known
    confidence times the certainty density. The `masks` best ones are computed, those of the active block first. They
    are chosen from the active block and as many later ones as it takes to have `masks` masks. Of the other columns,
    masks included, a nucleus of the attention rollout with mass `rollout` is computed. The rollout is the product over
    layers of attention mixed with the identity. Its column sums are the scores. Attention is the mean over heads, and a
    row that is not computed looks at itself.

    A mask that is not computed keeps its confidence for the choice, but no scheduler may commit it. A schedule that
    asks for more commits gets fewer. Each layer also computes attention probabilities. The rollout takes L x L numbers
    per row.

    Four slips of the published code are not repeated. It never updates the confidences of the first forward. It can
    commit masks that were not computed, from empty logits. It rounds to blocks by the length of the rest of a block.
    On Dream it computes the prompt's last row only with the first mask, even if the rollout chose it.

    Two more things differ. Published code fills the rows of a batch up to the same number of columns, by score. Here a
    row computes in a batch what it computes alone. When a block is full, the code prefers masks of that block, which
    has none, and this class those of the next one.

    Args:
        masks: number of masks that are computed.
        rollout: attention mass of the other columns that are computed. Above 0 it is at least one. 1 computes all.
        sigma: width of the density's Gaussian in positions.
        gap: columns between two chosen ones are computed, too, if the two are at most `gap` apart. 0 adds none.
    """

    uses_padded_plan: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    judges_draws: ClassVar[bool] = True

    masks: int = 32
    rollout: float = 0.1
    sigma: float = 10.0
    gap: int = 4
    confidence: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] float64, as last predicted
    stale: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: written by the last step
    flow: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1, L] rollout up to the layer just run

    def __post_init__(self) -> None:
        check_count("cache.masks", self.masks)
        check_count("cache.gap", self.gap, 0)
        check_share("cache.rollout", self.rollout)
        check_positive("cache.sigma", self.sigma, "a number of positions")

    @override
    def begin(self, canvas: Canvas) -> None:
        self.confidence = torch.zeros(canvas.ids.shape, dtype=torch.float64, device=canvas.ids.device)
        self.stale = torch.zeros_like(canvas.masked)
        batch, columns = canvas.ids.shape
        precise = torch.promote_types(self.spec.dtype, torch.float32)
        self.flow = torch.zeros(batch, columns, columns - 1, dtype=precise, device=canvas.ids.device)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return canvas.step == 0

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        seen = canvas.seen()
        chosen = (self.predicting_columns(self.wanted(canvas)) | self.stale) & seen
        chosen = chosen | self.looked_at(seen, seen & ~chosen)
        return between(chosen, self.gap) & seen | self.due(canvas)[:, None]

    def wanted(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` masks to predict."""
        column, start, end = canvas.columns(), canvas.start[:, None], canvas.end[:, None]
        later = canvas.masked & (column >= start) & (column < end)
        size = (canvas.stop - canvas.start).clamp(min=1)[:, None]
        # Blocks as long as this one, up to the one that holds the last of that many masks.
        last = torch.where(later & (later.cumsum(1) <= self.masks), column, start).amax(1, keepdim=True)
        until = torch.where(later.sum(1, keepdim=True) < self.masks, end, start + ((last - start) // size + 1) * size)
        answer = canvas.answer()
        near = self.confidence.gather(1, answer) * density(canvas, answer, self.sigma)
        score = self.confidence.scatter(1, answer, near)
        score = score + 2 * canvas.in_block()
        return select.top(score, later & (column < until), torch.full_like(canvas.start, self.masks))

    def looked_at(self, seen: Tensor, among: Tensor) -> Tensor:
        """Return `[B, L+1] bool` columns of `among` with the most rollout from the rows `seen`, up to its share."""
        if self.rollout in (0, 1):
            return among & bool(self.rollout)
        mass = (seen[:, None].to(self.flow.dtype) @ self.flow)[:, 0]  # [B, L]
        mass = F.pad(mass.double(), (0, 1))
        place = select.rank(mass, among)
        mass = mass * among
        share = mass / mass.sum(1, keepdim=True).clamp(min=1e-9)
        ordered = torch.zeros_like(share).scatter(1, place, share).cumsum(1).gather(1, place)
        return among & ((ordered <= self.rollout) | (place == 0))

    @override
    def narrow(self, canvas: Canvas, query: Query, predicted: Tensor) -> Query:
        if query.keeps_positions:
            return query
        query = super().narrow(canvas, query, predicted)  # and adds all computed masks, for their confidence
        return query.join(canvas, canvas.masked & predicted, max(canvas.layout.longest, query.positions.shape[1]))

    @override
    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        assert isinstance(plan, PaddedPlan)
        q, k, v = parts.qkv(hidden, rope)
        k, v, mask = self.store(index, k, v, plan)
        hidden = hidden + parts.attend(q, k, v, mask)
        if index == 0:
            self.flow = torch.zeros_like(self.flow)  # a new tensor: rows that wait keep the one before
            self.flow.diagonal(dim1=1, dim2=2).fill_(1)
        self.roll(parts.weights(q, k, mask), plan.positions)
        return hidden + parts.mlp(hidden)

    def roll(self, weights: Tensor, positions: Tensor) -> None:
        """Multiply the rollout by a layer's attention `weights [B, H, M, S]` of the rows at `positions [B, M]`."""
        length = self.flow.shape[2]
        mean = weights.mean(1)[..., :length].to(self.flow.dtype)  # [B, M, L]
        own = take(self.flow, positions)
        put(self.flow, positions, (mean @ self.flow[:, :-1] + own) / (1 + mean.sum(-1, keepdim=True)))

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.stale = written(canvas, query, edit)
        known = self.confidence.gather(1, query.positions)
        sure = torch.where(canvas.masked.gather(1, query.positions), readout.confidence[:, 0], known)
        self.confidence = self.confidence.scatter(1, query.positions, sure)


def between(chosen: Tensor, gap: int) -> Tensor:
    """Return `[B, L+1] bool` the columns `chosen [B, L+1]`, and those between two that are at most `gap` apart."""
    far = chosen.shape[1] + gap
    column = torch.arange(chosen.shape[1], device=chosen.device)
    before = torch.where(chosen, column, -far).cummax(1).values
    after = torch.where(chosen, column, 2 * far).flip(1).cummin(1).values.flip(1)
    return chosen | (after - before <= gap)
