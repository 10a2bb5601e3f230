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
    """Commit only the block's first position from the forward that opens it, whatever its confidence.

    Source: Fast-dLLM's Dream path (arXiv 2505.22618): its window starts at the block, where the logit shift leaves
    the first position without a prediction (`PublishedWindow`). The clean way is a window one position wider. These
    loops leave a full block whatever the inner schedule still plans for it, so its `keep_block` is not passed on.

    Args:
        inner: the scheduler of every other step; it sees the opening step too, and may count it.
    """

    @property
    def traits(self) -> Traits:
        """The first position must be predicted."""
        return replace(super().traits, needs_every_position=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = self.inner.tell(canvas, query, readout, carry)
        first = canvas.eligible(query.positions) & (query.positions == canvas.start[:, None])
        commit = torch.where((canvas.age == 0)[:, None], first, edit.commit)
        return replace(edit, commit=commit, keep_block=None), carry

    def bound(self, tokens: int) -> int:
        """One opening forward per block may be spent on a single position."""
        return 2 * self.inner.bound(tokens)


def forces_first(scheduler: Scheduler) -> bool:
    """Return True if a scheduler, or one inside it, commits a block's first position by force."""
    if isinstance(scheduler, ForcedFirst):
        return True
    return isinstance(scheduler, Around) and forces_first(scheduler.inner)
