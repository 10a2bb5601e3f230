"""WINO: commit widely, and remask tokens that the other tokens do not support."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import AllColumns, ShadowRows, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


def wide(eligible: Tensor, sure: Tensor, threshold: float, share: float, least: int, most: int) -> Tensor:
    """Return `[B]` the number of masks that a step commits: those above a threshold, but not too many.

    Args:
        eligible: `[B, Q] bool` masks of the block. There is at least one.
        sure: `[B, Q]` their confidence.
        share: upper bound on the share of these masks. It is clamped to [least, most] masks.
    """
    cap = (eligible.sum(1, dtype=torch.float64) * share).long().clamp(least, most)
    return torch.minimum((eligible & (sure > threshold)).sum(1), cap).clamp(min=1)


@dataclass(frozen=True)
class Wino(Scheduler):
    """WINO: masks are committed widely, and tokens that the others do not support become masks again.

        while masks remain in the block:
            token, confidence = model(canvas)
            support = probability of each committed token, by its shadow
            n = masks with confidence > threshold, at most share, in [least, most]
            commit the n surest masks, at least one
            remask tokens with support < back, the n - 1 least supported at most

    Source: WINO (wide-in, narrow-out), arXiv 2507.18578. Each forward carries a shadow of the block, mask tokens that
    attend to everything but their own position, so they predict a committed token without seeing it. A step
    gains one token at least, so a block of B positions takes at most B forwards. Positions committed in a step are not
    judged in it. It needs `cache=none`.

    Args:
        threshold: probability a mask must exceed to be committed. The best one is committed in any case.
        back: shadow probability below which a committed token is remasked, the least probable first. 0 remasks none.
        share, least, most: a step commits at most this share of the block's masks, within [least, most].
    """

    threshold: float = 0.6
    back: float = 0.9
    share: float = 0.7
    least: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        for name in ("threshold", "back", "share"):
            check_number(f"scheduler.{name}", getattr(self, name))
        check_count("scheduler.least", self.least)
        check_count("scheduler.most", self.most, self.least)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    @property
    def traits(self) -> Traits:
        """Traits of a rule that remasks tokens by shadow rows, which see every column."""
        rare = (AllColumns(), ShadowRows())
        return Traits(asks_block=False, revises=self.back > 0, scope="model", rare=rare)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the whole block, with a shadow row at each position (`Query.leave_one_out`)."""
        return replace(Query.window(canvas), leave_one_out=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.current is not None
        sure, inside = readout.confidence[:, 0], canvas.inside(query.positions)  # [B, Q]
        eligible = self.eligible(canvas, query, carry)
        accepted = wide(eligible, sure, self.threshold, self.share, self.least, self.most)

        support = readout.current[:, 0].exp()
        doubtful = inside & ~eligible & (support < self.back)
        counts = torch.cat([accepted, self.most_back(canvas, accepted, carry)])
        commit, remask = top(torch.cat([sure, -support]), torch.cat([eligible, doubtful]), counts).chunk(2)  # one sort
        return Edit(readout.token[:, 0], commit, remask), carry

    def eligible(self, canvas: Canvas, query: Query, carry: Carry) -> Tensor:
        """Return `[B, Q] bool`, the queried positions that the step may commit."""
        return canvas.eligible(query.positions)

    def most_back(self, canvas: Canvas, accepted: Tensor, carry: Carry) -> Tensor:
        """Return `[B]` the most tokens to remask in a step that commits `accepted [B]`, so that one is gained."""
        return accepted - 1
