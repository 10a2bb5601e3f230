"""SlowFast: find out how far the model can see, then decode that far in parallel."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import HiddenMasks, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class SlowFast(Threshold):
    """SlowFast sampling: a slow phase looks for the column up to which tokens are certain, and a fast one commits them.

        left = start of the block
        while masks remain in the block:
            repeat slow times, or until window edges deviate by less than sigma:
                token, confidence = model(canvas)
                commit the masks with confidence >= threshold, or else the surest
                edge = the column after the farthest mask with confidence >= glimpse
            while masks remain in [left, edge):
                token, confidence = model(canvas)
                commit as above, in [left, edge)
            left = edge

    Source: SlowFast Sampling, arXiv 2506.10848. Defaults are its code's, which runs it with `blocks=full`. If the slow
    phase ends by `slow`, the edge is the mean of the last `window` ones, rounded down.

    Args:
        threshold: probability from which a mask is committed (0.85 in the paper).
        glimpse: probability from which a mask moves the edge (0.1 in the paper).
        slow: upper bound on the forwards of a slow phase (8 in the paper). With 0 the edge is the block's end: plain
            threshold decoding.
        window, sigma: number of last edges compared, and the bound in positions on their deviation (1 in the paper).
        truncate: fast forwards after the first do not see the masks from the edge on: faster, but not exact.
    """

    glimpse: float = 0.3
    slow: int = 6
    window: int = 2
    sigma: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.glimpse", self.glimpse)
        check_number("scheduler.sigma", self.sigma)
        check_count("scheduler.slow", self.slow, 0)
        check_count("scheduler.window", self.window)

    @property
    @override
    def traits(self) -> Traits:
        facts = replace(super().traits, asks_block=False, scheduled=True)
        return replace(facts, scope="model").adding(HiddenMasks()) if self.truncate else facts

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` left, edge (0 if unknown) and forwards of each phase, and `[B, window]` the last edges."""
        zero = torch.zeros_like(canvas.start)
        return zero, zero, zero, zero, zero[:, None].double().repeat(1, self.window)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the masks of the block, in a fast phase only those before the edge."""
        _, edge, _, fast, _ = self._opened(canvas, carry)
        end = torch.where(fast >= 0, edge, canvas.stop)[:, None]
        masks = select.columns(canvas.masked & canvas.in_block() & (canvas.columns() < end), canvas.layout.width)
        query = Query.at(canvas, masks)
        return query.before(canvas, torch.where(fast > 0, edge, canvas.end)) if self.truncate else query

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        left, edge, slow, fast, seen = self._opened(canvas, carry)
        slowly = fast < 0  # [B] rows in a slow phase
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        eligible = eligible & (slowly[:, None] | (query.positions < edge[:, None]))
        commit = self.chosen_or_one(canvas, query, sure >= self.threshold, sure, eligible)

        glimpsed = torch.where(eligible & (sure >= self.glimpse), query.positions, left[:, None]).amax(1) + 1
        estimates = torch.cat([seen[:, 1:], glimpsed[:, None].double()], 1)
        seen, slow = torch.where(slowly[:, None], estimates, seen), slow + slowly
        stable = seen.var(1, correction=0) < self.sigma**2  # false before there are `window` estimates
        edge = torch.where(slowly & (edge == 0) & stable, seen[:, -1].long(), edge)
        over = slowly & self.ends(slow, edge)
        edge = torch.where(over & (edge == 0), seen.nanmean(1).long(), edge)
        fast = torch.where(slowly, fast.masked_fill(over, 0), fast + 1)

        # Counted on the canvas, since a cache may choose which masks are queried. With none before the edge it is over.
        filled = (commit & (query.positions < edge[:, None])).sum(1)
        full = (fast >= 0) & ~((replace(canvas, stop=edge).noise_left() > filled) & eligible.any(1))
        return Edit(readout.token[:, 0], commit), self._fresh(full, edge, left, edge, slow, fast, seen)

    def ends(self, slow: Tensor, edge: Tensor) -> Tensor:
        """Return `[B] bool` rows whose slow phase is over after `slow [B]` forwards. `edge [B]` is 0 if unknown."""
        return (slow >= self.slow) | (edge > 0)

    def _opened(self, canvas: Canvas, carry: Carry) -> Carry:
        """Return the state, which begins again in rows whose block opens."""
        left, edge, *rest = self._fresh(canvas.age == 0, canvas.start, *carry)
        return left, edge if self.slow else canvas.stop, *rest

    def _fresh(self, new: Tensor, start: Tensor, *state: Tensor) -> Carry:
        """Return the state, with a cycle that begins at `start` in rows `new [B]`. With `slow=0` a cycle is fast."""
        left, edge, slow, fast, seen = state
        fast, seen = fast.masked_fill(new, -1 if self.slow else 0), seen.masked_fill(new[:, None], torch.nan)
        return torch.where(new, start, left), edge.masked_fill(new, 0), slow.masked_fill(new, 0), fast, seen
