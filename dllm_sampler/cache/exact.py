"""The default cache, which changes no answer."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.protocols import Cache, Context
from dllm_sampler.core.spec import AllColumns


@dataclass
class ExactCache(BaseCache):
    """The cache `block_causal` for block-causal models, and `none` for all others.

    Under a scheduler that needs every column computed (`wino`) it is `none` for block-causal models, too.
    """

    stores: ClassVar[bool] = False

    @override
    def bind(self, context: Context) -> Cache:
        whole = context.scheduler is not None and context.scheduler.traits.has(AllColumns)
        chosen = BlockCausalCache() if context.spec.attention != "bidirectional" and not whole else NoCache()
        return chosen.bind(context)
