"""Caches whose window begins with the block, as in Fast-dLLM's cached Dream loops."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.cache.sparse import SparseCache
from dllm_sampler.cache.window import WindowCache
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Cache, Context
from dllm_sampler.errors import UserError
from dllm_sampler.published.forced import forces_first


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
