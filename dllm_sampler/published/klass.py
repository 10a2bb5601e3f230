"""KLASS as in its published code."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import AllColumns, Traits
from dllm_sampler.core.statistics import Predictions
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.published.fixed import AnyBlock, PublishedFixedSteps
from dllm_sampler.schedulers.klass import Klass


@dataclass(frozen=True)
class PublishedKlass(Klass):
    """KLASS whose history of divergences starts from zeros and continues from block to block.

    Source: KLASS, arXiv 2511.05664. Each forward predicts every mask of the canvas. A block is closed after its steps,
    even with masks left in it. It needs `cache=none`.
    """

    share, ask = PublishedFixedSteps.share, AnyBlock.ask

    @property
    def precise(self) -> bool:
        """True, so that divergences are computed as published."""
        return True

    @property
    def traits(self) -> Traits:
        """Traits of KLASS. It also queries masks after the block, for their history."""
        return replace(super().traits, asks_block=False, scheduled=True).adding(AllColumns())

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        opened, asked, then, moves = carry
        (count, opened), now = self.count(canvas, opened), Predictions.of(readout)
        at, eligible = query.positions.contiguous(), canvas.eligible(query.positions)
        # No masks are added, so the last forward also predicted each of these.
        last = torch.searchsorted(asked, at).clamp(max=asked.shape[1] - 1)  # [B, Q]
        row = last + select.arange(len(asked), last.device)[:, None] * asked.shape[1]
        move = now.drift(then, row, self.precise).clamp(min=0)
        past = torch.cat([moves.flatten(0, 1)[row][..., 1:], move[..., None]], -1)  # [B, Q, history]
        sure = readout.confidence[:, 0]  # [B, Q]
        ready = eligible & (sure > self.threshold) & (past < self.divergence).all(-1)
        ready = ready & (canvas.age >= self.history - 1)[:, None]
        score = -move if self.take == "steadiest" else sure
        chosen = ready if self.take == "all" else select.top(score, ready, torch.ones_like(canvas.age))
        share = select.top(self.order(canvas, query, readout, count), eligible, count)
        commit, close_block = torch.where(ready.any(1)[:, None], chosen, share), canvas.age + 1 >= opened[1]
        return Edit(readout.token[:, 0], commit, close_block=close_block), (opened, at, now, past)


@dataclass(frozen=True)
class MostUncertain(PublishedKlass):
    """KLASS with the published code's `alg=entropy`, which ranks the highest entropy first."""

    @override
    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        return -super().rate(canvas, query, readout)
