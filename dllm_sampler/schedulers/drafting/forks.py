"""Forks: the canvas with one more token, in several ways, for a forward that computes them all."""

from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core.protocols import Blocks
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout


class Forks(NamedTuple):
    """The candidates 1, 2, ... of the next query. Each is candidate 0, the canvas, with one more token."""

    at: Tensor  # [B, F] the column of that token, L for a missing fork
    ids: Tensor  # [B, F] the token
    sure: Tensor  # [B, F] its probability
    worth: Tensor  # [B, F] the score of its position
    stop: Tensor  # [B] where the active block ended in the forward that they were made from

    @classmethod
    def none(cls, canvas: Canvas, count: int) -> Self:
        """Return missing forks: `count` of them, or one per position of the widest block if these are fewer."""
        at = torch.full((len(canvas.ids), min(count, canvas.layout.width)), canvas.length, device=canvas.ids.device)
        zero = torch.zeros_like(at, dtype=torch.float64)
        return cls(at, torch.zeros_like(at), zero, zero, canvas.stop)

    @classmethod
    def best(cls, canvas: Canvas, query: Query, readout: Readout, score: Tensor, count: int) -> Self:
        """Return forks at the `count` masks of the block with the highest `score [B, Q]`, by tokens of `readout`."""
        score = score.masked_fill(~canvas.eligible(query.positions), -torch.inf)
        count = min(count, canvas.layout.width)
        lack = max(0, count - score.shape[1])
        worth, place = F.pad(score, (0, lack), value=-torch.inf).sort(dim=1, descending=True, stable=True)
        worth, place = worth[:, :count], place[:, :count].clamp(max=score.shape[1] - 1)
        none = worth == -torch.inf
        return cls(
            query.positions.gather(1, place).masked_fill(none, canvas.length),
            readout.token[:, 0].gather(1, place),
            readout.confidence[:, 0].gather(1, place),
            worth.masked_fill(none, 0),
            canvas.stop,
        )

    def live(self, canvas: Canvas) -> Tensor:
        """Return `[B, K] bool` candidates to compute: the canvas, and forks whose position is still a mask."""
        return F.pad(canvas.eligible(self.at), (1, 0), value=True)

    def stops(self, canvas: Canvas, blocks: Blocks) -> Tensor | None:
        """Return `[B, K]` the end of each candidate's active block. None if all have that of the canvas."""
        if not (blocks.several or blocks.slides):
            return None
        before, found = replace(canvas, stop=self.stop), [canvas.stop]
        for at, token in zip(self.at.T[..., None], self.ids.T[..., None], strict=True):
            moved = blocks.move(before.apply(at, Edit(token, torch.ones_like(at, dtype=torch.bool))))
            assert moved is not None
            found.append(moved[1])
        return torch.where(self.live(canvas), torch.stack(found, 1), canvas.stop[:, None])

    def candidates(self, canvas: Canvas, query: Query, stops: Tensor | None) -> Query:
        """Return `query`, which has the canvas as its only candidate, with the forks as further ones."""
        filled = query.positions[:, None] == self.at[..., None]  # [B, F, Q]
        ids = torch.cat([query.ids, torch.where(filled, self.ids[..., None], query.ids)], 1)
        return replace(query, ids=ids, candidates=Candidates(self.live(canvas), stops=stops, forks=True))

    def winner(self, canvas: Canvas, query: Query, score: Tensor, share: float, alpha: float) -> Tensor:
        """Return `[B]` the candidate with the surest masks. On a tie the first fork wins, and the canvas comes last.

        Args:
            score: `[B, K, Q]` certainty of the model at each position.
            share: share of a candidate's masks, those with the lowest scores, in the mean. The mean is 1 without masks.
            alpha: weight of the score at the fork's position (1 for the canvas) against that mean.
        """
        masks = self._masks(canvas, query)
        left = masks.sum(2)  # [B, K]
        few = (left.double() * share).long().clamp(min=1)
        lowest = score.masked_fill(~masks, torch.inf).sort(dim=2).values
        # Summed one by one: a row sums the same numbers in the same order among longer ones.
        mean = (lowest.cumsum(2).gather(2, few[..., None] - 1)[..., 0] / few).masked_fill(left == 0, 1.0)
        total = alpha * F.pad(self.worth, (1, 0), value=1.0) + (1 - alpha) * mean
        live = query.candidates.live
        assert live is not None
        total = total.masked_fill(~live, -torch.inf).roll(-1, 1)
        return (total.argmax(1) + 1) % total.shape[1]

    def write(self, query: Query, candidate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the position that only `candidate [B]` fills, its token and its probability, each `[B, Q]`."""

        def of(values: Tensor) -> Tensor:
            return F.pad(values, (1, 0), value=-1).gather(1, candidate[:, None]).expand_as(query.positions)

        return query.positions == of(self.at), of(self.ids), of(self.sure)

    def _masks(self, canvas: Canvas, query: Query) -> Tensor:
        """Return `[B, K, Q] bool` the positions of the active block at which each candidate has masks."""
        stops = query.candidates.stops
        masks = canvas if stops is None else replace(canvas, stop=stops.amax(1))
        masks = masks.eligible(query.positions)[:, None]
        if stops is not None:
            masks = masks & (query.positions[:, None] < stops[..., None])
        return masks & (query.positions[:, None] != F.pad(self.at, (1, 0), value=-1)[..., None])
