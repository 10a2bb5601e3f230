"""The forced commit and the window of Fast-dLLM's cached Dream loops."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.cache.sparse import SparseCache
from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.around import Around
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Cache, Carry, Context, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError


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


class PublishedWindow(WindowCache):
    """A window that begins with the block, even on a model with a logit shift.

    Source: Fast-dLLM's Dream path (arXiv 2505.22618). On such a model only the forward that opens a block predicts the
    block's first position, so the scheduler must be a `ForcedFirst`. On other models nothing changes.
    """

    def bind(self, context: Context) -> Cache:
        """Return a cache for this model, as `Cache.bind`.

        Raises:
            UserError: the model has a logit shift, and the scheduler is not a `ForcedFirst`.
        """
        scheduler = context.scheduler
        if context.spec.shift and scheduler is not None and not forces_first(scheduler):
            raise UserError(
                "cache-incompatible",
                f"cache={named(self)} predicts a block's first position only in the forward that opens the block, since"
                f" this model has a logit shift, and scheduler={named(scheduler)} may not commit it then. Pass"
                " dllm_sampler.published.ForcedFirst(scheduler).",
            )
        return super().bind(context)

    @property
    @override
    def back(self) -> int:
        return 0


@dataclass
class PublishedPrefixCache(PublishedWindow, PrefixCache):
    """`PrefixCache` with the published window."""


@dataclass
class PublishedDualCache(PublishedWindow, DualCache):
    """`DualCache` with the published window."""


@dataclass
class PublishedSparseCache(PublishedWindow, SparseCache):
    """`SparseCache` with the published window (arXiv 2508.02558)."""
