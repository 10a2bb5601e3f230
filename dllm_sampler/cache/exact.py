"""The default: whatever cache changes no answer."""

from dataclasses import dataclass
from typing import ClassVar

from dllm_sampler.cache.base import Cache
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.protocols import ModelSpec, Scheduler


@dataclass
class ExactCache(Cache):
    """`block_causal` for block-causal models, unless the scheduler needs every position anew; `none` for all others.

    Approximate caches are to be asked for.
    """

    stores: ClassVar[bool] = False

    def suit(self, spec: ModelSpec, scheduler: Scheduler) -> Cache:
        """See `Cache.suit`."""
        return BlockCausalCache() if spec.attention == "block_causal" and not scheduler.whole else NoCache()
