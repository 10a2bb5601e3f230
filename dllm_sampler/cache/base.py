"""The base of caches: the default layer on a pack, and the padded form for caches that run the layers themselves."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.slots import Slots
from dllm_sampler.core import select
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import ForwardRequest, HeadRows, Pack
from dllm_sampler.core.protocols import Cache, Context, LayerParts, Plan
from dllm_sampler.core.spec import AllColumns, BlocksOpenedAhead, ChangingLength, HiddenMasks, ModelSpec, SoftInputs
from dllm_sampler.core.values import Canvas, Edit, Query
from dllm_sampler.core.visibility import Visible, mask_of
from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class PaddedPlan(Plan):
    """A plan in padded form: each row has as many positions as the longest one.

    Caches that run the layers themselves use it. Padding costs as much as a position.
    """

    positions: Tensor = field(kw_only=True)  # [B, M] sorted columns, padded with L
    # [B, L+1] bool: keys that all positions of the row see, or [B, M, L+1] by position. None means all
    keys: Tensor | None = field(kw_only=True)
    contiguous: bool = field(kw_only=True)  # positions are the columns 0..M-1 of every row
    # [B*M] indices of the positions in a buffer of B*(L+1) columns. None if contiguous
    slots: Tensor | None = field(kw_only=True)


@dataclass
class BaseCache(Cache):
    """A base class for caches that lacks only the choice of columns (`computes`).

    Attributes:
        uses_padded_plan: It runs the layers itself, on padded rows.
        chooses: It chooses the masks that are predicted. Schedulers that need a prediction of all masks are refused.
        keeps_noise: It serves masks as an earlier forward saw them. If false: It computes every mask that is seen.
        refreshes: The first forward of a block computes every column.
        steady: Predictions depend on the canvas and the block's first forward alone, not on forwards in between.
        supports_resize: It serves answers whose length changes.
        causal: It serves models with block-causal attention or a causal context only.
    """

    uses_padded_plan: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = True
    refreshes: ClassVar[bool] = False
    steady: ClassVar[bool] = False
    supports_resize: ClassVar[bool] = False
    causal: ClassVar[bool] = False

    slots: Slots | None = field(init=False, default=None, repr=False, compare=False)
    spec: ModelSpec = field(init=False, repr=False, compare=False)
    memory: Any = field(init=False, default=None, repr=False, compare=False)  # see `Cache.memory`
    twin: Cache | None = field(init=False, default=None, repr=False, compare=False)
    live: bool = field(init=False, default=False, repr=False, compare=False)
    # the last plan, if the candidates of its query are forks
    forked: Plan | None = field(init=False, default=None, repr=False, compare=False)

    @override
    def bind(self, context: Context) -> Cache:
        self._refuse_live()
        why = next(self._obstacles(context), None)
        if why is not None:
            raise UserError("cache-incompatible", why)
        return self

    @override
    def init(self, canvas: Canvas, spec: ModelSpec) -> Self:
        self._refuse_live()
        live = copy(self)  # `replace` would lose the fields that `bind` has set
        live.spec, live.live = spec, True
        live.slots = live.buffers(canvas) if self.stores else None
        live.begin(canvas)
        if spec.branches == 2:
            live.twin = self.init(canvas, replace(spec, branches=1))
        return live

    @override
    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        head_rows = HeadRows.of(wanted)
        sees, entries = self.sees(canvas, wanted.query), wanted.entries(canvas)
        if self.uses_padded_plan:
            return self.padded(canvas, wanted, head_rows, sees, entries)
        plan = Plan(self, wanted, head_rows, entries, Pack.of(canvas, wanted, head_rows, self.spec, sees))
        if wanted.query.candidates.forks and self.slots is not None:
            plan = self.forked = replace(plan, pairs=[])
        return plan

    @override
    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        # A pack. A cache with `uses_padded_plan` overrides this, and gets `hidden [B, M, D]`.
        assert plan.pack is not None and plan.attention is not None
        q, k, v = parts.qkv(hidden, rope)
        if plan.pairs is not None:
            plan.pairs.append((k[0].transpose(0, 1), v[0].transpose(0, 1)))
        stored = None
        if self.slots is not None:
            self.slots.store(index, k, v, plan.pack.slots)
            stored = self.slots.keys[index], self.slots.values[index]
        heads = plan.attention(q, k, v, stored)  # [1, H, T, Dh]
        if plan.last:
            heads, hidden = (
                heads.index_select(2, plan.pack.head_entries),
                hidden.index_select(1, plan.pack.head_entries),
            )
        hidden = hidden + parts.output(heads)
        return hidden + parts.mlp(hidden)

    @override
    def adopt(self, candidate: Tensor) -> None:
        plan, self.forked = self.forked, None  # the forward itself stored keys and values of candidate 0
        if plan is None:
            return
        pack, layers = plan.pack, self.spec.num_layers
        assert pack is not None and plan.pairs is not None
        if pack.segment is None:
            return
        for part, cache in enumerate([self, self.twin] if self.twin is not None else [self]):
            slots = cache.slots
            assert slots is not None
            nowhere = len(candidate) * slots.columns - 1
            won = pack.segment == candidate[pack.row]
            places = torch.where(won, pack.row * slots.columns + pack.column, nowhere)
            for index, (k, v) in enumerate(plan.pairs[part * layers : (part + 1) * layers]):
                slots.store(index, k.transpose(0, 1)[None], v.transpose(0, 1)[None], places)

    # For subclasses.

    def begin(self, canvas: Canvas) -> None:
        """Set the fields of a live copy before its first step, `slots` and `spec` excepted."""

    def buffers(self, canvas: Canvas) -> Slots:
        """Return empty buffers for this canvas. By default every column has a slot."""
        return Slots(self.spec, *canvas.ids.shape)

    def sees(self, canvas: Canvas, query: Query) -> Visible:
        """Return the columns that each position sees. By default the model's attention and the query decide."""
        return Visible.of(canvas, query, self.spec.attention)

    def due(self, canvas: Canvas) -> Tensor:
        """Return `[B] bool` rows whose next forward refreshes every slot. By default those that open a block."""
        return canvas.age == 0

    def predicting_columns(self, columns: Tensor) -> Tensor:
        """Return `[B, L+1] bool` columns whose hidden states predict `columns [B, L+1]`."""
        return columns.roll(-1, 1) if self.spec.shift else columns

    def store(self, index: int, k: Tensor, v: Tensor, plan: PaddedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the fresh `k, v [B, Hkv, M, Dh]`. Return the `k, v [B, Hkv, S, Dh]` to attend to, and their mask."""
        if self.slots is not None:
            self.slots.write(index, k, v, plan.slots)
            k, v = self.slots.read(index, self.slots.columns - 1 if plan.keys is None else plan.keys.shape[-1])
        return k, v, mask_of(plan.keys)

    def padded(
        self, canvas: Canvas, wanted: ForwardRequest, head_rows: HeadRows, sees: Visible, entries: Tensor
    ) -> PaddedPlan:
        """Return the padded form: all L columns if every live row computes all of its own, else the longest row's M."""
        whole = wanted.sizes.whole
        if whole:
            positions, slots = canvas.columns()[:, :-1].expand(len(canvas.ids), -1), None
        else:
            positions = select.columns(wanted.computed, wanted.sizes.longest)  # [B, M]
            starts = select.arange(canvas.ids.numel(), positions.device)[:: canvas.ids.shape[1], None]
            slots = (positions + starts).flatten()
        keys = sees.keys(canvas, wanted.query, positions)
        common = (self, wanted, head_rows, entries)
        return PaddedPlan(*common, positions=positions, keys=keys, contiguous=whole, slots=slots)

    def _refuse_live(self) -> None:
        if self.live:
            raise UserError(
                "cache-in-use",
                f"This {type(self).__name__} belongs to one generation. Pass the cache that it was made from.",
            )

    def _obstacles(self, context: Context) -> Iterator[str]:
        """Yield reasons why the cache cannot serve the model, the blocks or the scheduler."""
        spec, cache = context.spec, f"cache={named(self)}"
        others = "cache=exact or cache=none" if self.causal else "cache=dual, cache=prefix or cache=none"
        if self.stores and not spec.cacheable:
            yield f"{cache} cannot serve this model because its forward computes whole rows only. Use cache=none."
        if self.causal and spec.attention == "bidirectional":
            yield f"{cache} is for block-causal models, and this one sees every column. Use cache=dual or cache=exact."
        if self.stores and not self.causal and spec.attention != "bidirectional":
            yield (
                f"{cache} is for models that see the whole canvas, and this model's attention is {spec.attention}."
                " Use cache=exact or cache=none."
            )
        if context.blocks.hides and self.keeps_noise:
            yield (
                f"blocks={named(context.blocks)} hides the masks of blocks that are not open, and {cache} serves masks"
                f" as an earlier forward saw them. Use {others.replace('dual', 'd2f')}."
            )
        if context.blocks.slides and self.refreshes:
            yield (
                f"{cache} refreshes what it stores when a block opens, and blocks={named(context.blocks)} opens only"
                " one. Use cache=sliding or cache=none."
            )
        if context.scheduler is None:
            return
        traits, scheduler = context.scheduler.traits, f"scheduler={named(context.scheduler)}"
        if traits.has(AllColumns) and self.stores:
            yield (
                f"{scheduler} needs every position computed in each forward, and {cache} computes only some. Use"
                " cache=none."
            )
        if traits.has(ChangingLength) and self.stores and not (self.supports_resize or self.causal):
            yield (
                f"{scheduler} moves columns and adds new ones, and {cache} serves columns as an earlier forward left"
                " them. Use cache=prefix, which computes every column that can move, or cache=none."
            )
        if traits.has(BlocksOpenedAhead) and self.stores:
            yield (
                f"scheduler.eager=true opens blocks without a forward of their own, and {cache} needs that forward to"
                " refresh what it stores. Use scheduler.eager=false or cache=none."
            )
        if traits.drafts and not self.steady:
            yield (
                f"{scheduler} predicts from drafts that may be rejected, and what {cache} stores depends on drafts. Use"
                f" {others}."
            )
        if traits.has(SoftInputs) and self.stores and (self.uses_padded_plan or not self.steady):
            yield (
                f"{scheduler} feeds mixtures of embeddings, and {cache} would serve their keys to later forwards. Use"
                f" {others}."
            )
        hidden = traits.find(HiddenMasks)
        if hidden is not None and hidden.horizon is not None and self.keeps_noise:
            yield (
                f"{scheduler} hides masks beyond scheduler.max_lookahead, and {cache} serves masks as an earlier"
                f" forward saw them. Use {'cache=exact' if self.causal else 'cache=trailing'}, cache=none or"
                " scheduler.max_lookahead=null."
            )
        if traits.needs_every_position and self.chooses:
            yield (
                f"{scheduler} needs a prediction at every position that it queries, and {cache} chooses which masks to"
                " predict. Use cache=dual or cache=none."
            )


def changed(canvas: Canvas, query: Query, edit: Edit) -> Tensor:
    """Return `[B, L+1] bool` columns whose committed tokens `edit` replaces or remasks. Their stored keys are void."""
    return written(canvas, query, edit) & ~canvas.masked


def written(canvas: Canvas, query: Query, edit: Edit) -> Tensor:
    """Return `[B, L+1] bool` columns that `edit` commits or remasks. They must be computed again."""
    touched = edit.commit if edit.remask is None else edit.commit | edit.remask
    # Padding repeats the empty slot. No other position occurs twice.
    return torch.zeros_like(canvas.masked).scatter(1, query.positions, touched)


def take(stored: Tensor, columns: Tensor) -> Tensor:
    """Return `[B, M, ...]` rows of `stored [B, S, ...]` at `columns [B, M]`. Columns from S on take the last row."""
    at = columns.clamp(max=stored.shape[1] - 1)
    return stored.gather(1, at.view(*at.shape, *[1] * (stored.dim() - 2)).expand(*at.shape, *stored.shape[2:]))


def put(stored: Tensor, columns: Tensor, fresh: Tensor) -> None:
    """Write `fresh [B, M, ...]` to `columns [B, M]` of `stored [B, L+1, ...]`, in place."""
    at = columns.view(*columns.shape, *[1] * (fresh.dim() - 2)).expand_as(fresh)
    stored.scatter_(1, at, fresh.to(stored.dtype))
