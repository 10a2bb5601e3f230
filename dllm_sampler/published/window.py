"""The window of Fast-dLLM's cached Dream loops, and of those made from them: it begins with the block."""

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
    """On a model with a logit shift nothing predicts a block's first position, but the forward that opens the block.

    Source: Fast-dLLM's Dream path (arXiv 2505.22618). It needs `ForcedFirst`. No difference on other models.
    """

    def bind(self, context: Context) -> Cache:
        """See `Cache.bind`.

        Raises:
            UserError: the scheduler does not commit the position that nothing predicts.
        """
        scheduler = context.scheduler
        if context.spec.shift and scheduler is not None and not forces_first(scheduler):
            raise UserError(
                "cache-incompatible",
                f"cache={named(self)} leaves each block's first position without a prediction on this model,"
                f" and scheduler={named(scheduler)} does not commit it first. Put ForcedFirst around it.",
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
