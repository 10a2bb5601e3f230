"""The forced commit of Fast-dLLM's cached Dream loops, around any scheduler."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class ForcedFirst(Around):
    """A scheduler that commits exactly the block's first position in the forward that opens the block.

    Source: Fast-dLLM's Dream path (arXiv 2505.22618). Its window starts at the block (`PublishedWindow`), so that under
    a logit shift no later forward predicts the first position. The package's caches compute one more position instead.
    The published loops close a full block at once, so `keep_block` of the inner scheduler is ignored.

    Args:
        inner: the scheduler of every other step. It is also called in the opening step.
    """

    @property
    def traits(self) -> Traits:
        """Traits of the inner scheduler. The first position must be predicted."""
        return replace(super().traits, needs_every_position=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = self.inner.tell(canvas, query, readout, carry)
        first = canvas.eligible(query.positions) & (query.positions == canvas.start[:, None])
        commit = torch.where((canvas.age == 0)[:, None], first, edit.commit)
        return replace(edit, commit=commit, keep_block=None), carry

    def bound(self, tokens: int) -> int:
        """Return twice the inner bound. The opening forward of each block may commit a single position."""
        return 2 * self.inner.bound(tokens)


def forces_first(scheduler: Scheduler) -> bool:
    """Return True if a scheduler, or one inside it, commits a block's first position by force."""
    if isinstance(scheduler, ForcedFirst):
        return True
    return isinstance(scheduler, Around) and forces_first(scheduler.inner)
