"""The base of wrappers that leave masks after the block out of the forwards of another cache."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.cache.prefix import PrefixCache
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import Cache, Context, Plan
from dllm_sampler.core.spec import AllColumns, BlocksOpenedAhead, ChangingLength, ModelSpec
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError, invalid


@dataclass
class SuffixCache(Cache, ABC):
    """A wrapper that leaves masks after the block out of its forwards. The inner cache does everything else.

    The masks that stay are chosen when a block opens (`keeps`), until it is over. The others do not exist for the
    block: they are not queries, and nothing attends to their keys. They keep their columns and come back for later
    blocks. Given tokens after the block stay. If the first forward shortens a block (`Blocks.sizes_on_open`), the
    columns that it cut off stay, too.

    Args:
        inner: the cache for the columns that stay.
    """

    inner: Cache = field(default_factory=PrefixCache)
    hidden: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: columns that the block does not see

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Cache):
            raise invalid("cache.inner", self.inner, "Give an instance of a Cache, as PrefixCache()", "option-type")
        # The engine asks the wrapper, and the inner cache decides.
        vars(self).update({name: getattr(self.inner, name) for name in ("stores", "syncs", "shared", "judges_draws")})

    @abstractmethod
    def keeps(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` columns after the block (`stop`) that stay. Values before `stop` are ignored."""

    @override
    def bind(self, context: Context) -> Cache:
        why = next(self._obstacles(context), None)
        if why is not None:
            raise UserError("cache-incompatible", why)
        if isinstance(self.inner, SuffixCache):
            raise UserError(
                "cache-incompatible",
                f"cache={named(self)} and cache.inner={named(self.inner)} both choose masks. Set cache.inner=dual.",
            )
        if not isinstance(self.inner, BaseCache) or (
            self.inner.stores and self.inner.keeps_noise and not self.inner.refreshes
        ):
            raise UserError(
                "cache-incompatible",
                f"cache={named(self)} hides other masks in each block, so its inner cache must compute all columns when"
                f" a block opens, unlike cache.inner={named(self.inner)}. Set cache.inner to prefix, dual or none.",
            )
        try:
            return replace(self, inner=self.inner.bind(context))
        except UserError as error:
            said = re.sub(r"cache\.(?!inner)(?=\w)|cache(?==)", lambda found: f"cache.inner{found[0][5:]}", str(error))
            raise UserError(error.code, f"cache={named(self)}: {said}") from None

    @override
    def init(self, canvas: Canvas, spec: ModelSpec) -> Self:
        live = copy(self)
        live.inner, live.spec = self.inner.init(canvas, spec), spec
        live.hidden = torch.zeros_like(canvas.masked)
        return live

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        behind, opens = canvas.columns() >= canvas.stop[:, None], (canvas.age == 0)[:, None]
        chosen = torch.where(opens, canvas.masked & ~self.keeps(canvas), self.hidden)
        self.hidden = chosen & behind  # a run of open blocks may have grown (`Blocks.several`)
        chosen = self.inner.computes(canvas)
        return ~self.hidden if chosen is None else chosen & ~self.hidden

    @override
    def narrow(self, canvas: Canvas, query: Query, predicted: Tensor) -> Query:
        hidden = self.hidden if query.hidden is None else self.hidden | query.hidden
        return replace(self.inner.narrow(canvas, query, predicted), hidden=hidden)

    @override
    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        return self.inner.plan(canvas, wanted)  # so the inner cache drives the layers

    @override
    def recalled(self, canvas: Canvas) -> Tensor | None:
        return self.inner.recalled(canvas)

    @override
    def restore(self, hidden: Tensor, plan: Plan) -> Tensor:
        return self.inner.restore(hidden, plan)

    @override
    def adopt(self, candidate: Tensor) -> None:
        self.inner.adopt(candidate)

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.inner.observe(canvas, query, edit, readout)

    def _obstacles(self, context: Context) -> Iterator[str]:
        """Yield reasons why no inner cache can serve the model, the blocks or the scheduler."""
        spec, cache = context.spec, f"cache={named(self)}"
        if spec.attention != "bidirectional":
            yield f"{cache} hides masks after the block, and this block-causal model never sees them. Use cache=exact."
        if not spec.cacheable:
            yield f"{cache} leaves masks out of the forward, and this model computes whole rows only. Use cache=none."
        if context.blocks.slides:
            yield (
                f"{cache} chooses masks when a block opens, and blocks={named(context.blocks)} opens only one. Use"
                " cache=sliding or cache=none."
            )
        if context.scheduler is None:
            return
        traits, scheduler = context.scheduler.traits, f"scheduler={named(context.scheduler)}"
        if traits.has(AllColumns):
            yield (
                f"{scheduler} needs every position computed in each forward, and {cache} leaves masks out. Use"
                " cache=none."
            )
        if traits.has(ChangingLength):
            yield (
                f"{scheduler} looks for the end of the answer after the block, where {cache} leaves masks out. Use"
                " cache=prefix or cache=none."
            )
        if traits.has(BlocksOpenedAhead):
            yield (
                f"scheduler.eager=true opens blocks without a forward of their own, and {cache} chooses by block what"
                " a forward sees. Use scheduler.eager=false or cache=none."
            )
