"""Elastic-Cache: attention of the most attended tokens decides from which layer on keys and values are refreshed."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, PaddedPlan, put, take, written
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import LayerParts, Plan
from dllm_sampler.core.statistics import significant
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.core.visibility import visible


@dataclass(frozen=True, kw_only=True)
class ElasticPlan(PaddedPlan):
    """A padded plan, with the columns whose attention the layers compare. Padding is L, the empty slot."""

    chosen: Tensor  # [B, L+1] bool: the planned positions as a set
    watched: Tensor  # [B, R] columns of the rows that predict the masks
    tracked: Tensor  # [B, T] columns of the tokens whose attention is compared
    known: Tensor  # [B, L+1] bool: decoded columns, which may be tracked next
    live: Tensor  # [B] bool: rows that are not finished
    columns: Tensor  # [B] number of columns that the row sees


@dataclass
class ElasticCache(BaseCache):
    """Elastic-Cache: a sliding window is computed, and deep layers are refreshed where attention has moved.

        computes   the `window` leftmost masks, the last commits, and tracked tokens
        reuses     all other columns
        refreshes  deeper layers, once attention of tracked tokens has moved in one

    Source: Elastic-Cache, arXiv 2510.14973. A forward computes the rows that predict the `window` leftmost masks, the
    tokens committed by the last step, and the tracked tokens. Each layer tracks the tokens that its window looked at
    most in the last forward. It compares their attention, averaged over heads, with that of their stored queries and
    the stored keys. If the cosine similarity is below `gamma`, all deeper layers compute every column, from stored
    inputs.

    Only masks in the window are predicted and can be committed, even if a schedule asks for more. Schedulers that need
    a prediction of every mask are refused. Memory is twice that of `dual`, and more with grouped heads.

    Published with `blocks=full`. Inside shorter blocks the window ends with the block. Masks after a committed
    end-of-text token come last. The published code drops them. Each row of a batch decides for itself. A layer is as
    wide as the row that needs most, and stores for each row only what that row needs.

    The host waits for the device once per layer until a row refreshes, since that decides the shape of the next layer.
    This is the only cache that reads the device inside a step.

    Args:
        gamma: similarity below which deeper layers are refreshed. -1 means never, 1 whenever attention has moved, and
            above 1 always.
        window: number of leftmost masks that are predicted.
        track: number of tokens tracked per layer.
        block_caching: reuse the masks after the window. If false, every forward computes them.
        full_every: steps from one whole forward to the next. 1 reuses nothing. By default only the first is whole.
    """

    uses_padded_plan: ClassVar[bool] = True
    syncs: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

    gamma: float = 0.9
    window: int = 16
    track: int = 1
    block_caching: bool = True
    full_every: int | None = None
    inputs: list[Tensor] = field(init=False, repr=False, compare=False)  # per layer [B, L+1, D]
    queries: list[Tensor] = field(init=False, repr=False, compare=False)  # per layer [B, L+1, H, Dh]
    stale: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: written by the last step
    tracked: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: tracked by some layer
    rope: Any = field(init=False, repr=False, compare=False)  # of all columns
    refresh_from: Tensor = field(init=False, repr=False, compare=False)  # [B] first layer refreshed by this forward
    wide: bool = field(init=False, repr=False, compare=False)  # this layer computes every column

    def __post_init__(self) -> None:
        check_number("cache.gamma", self.gamma, "a cosine similarity", least=-inf)
        check_count("cache.window", self.window)
        check_count("cache.track", self.track)
        check_count("cache.full_every", self.full_every, optional=True)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.inputs, self.queries = [], []
        self.stale = self.tracked = torch.zeros_like(canvas.masked)
        self.refresh_from = torch.zeros_like(canvas.step)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return canvas.step == 0 if self.full_every is None else canvas.step % self.full_every == 0

    def ahead(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` the window: the block's leftmost masks. Those after an end-of-text token come last."""
        masked = canvas.masked & canvas.in_block()
        ended = is_end(canvas.ids, self.spec.eos_ids) & ~canvas.masked & ~canvas.layout.frozen
        behind = ended.cumsum(1) > 0
        first = masked & ~behind
        among = torch.where(first.any(1, keepdim=True), first, masked)
        return among & (among.cumsum(1) <= self.window)

    def forwarded(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` rows that predict masks and are computed in each forward."""
        return self.predicting_columns(self.ahead(canvas) if self.block_caching else canvas.masked & canvas.seen())

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        return self.forwarded(canvas) | self.stale | self.tracked | self.due(canvas)[:, None]

    @override
    def narrow(self, canvas: Canvas, query: Query, predicted: Tensor) -> Query:
        query = query.drop(canvas, self.ahead(canvas))
        return replace(query, positions=query.positions[:, : self.window], ids=query.ids[:, :, : self.window])

    @override
    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        plan, seen = super().plan(canvas, wanted), visible(canvas, wanted.query)
        assert isinstance(plan, PaddedPlan)
        noise = canvas.layout.longest
        width = min(self.window, noise) if self.block_caching else noise
        chosen = torch.ones_like(seen) if plan.contiguous else self.computes(canvas) & seen
        return ElasticPlan(
            **vars(plan),
            chosen=chosen,
            watched=select.columns(self.forwarded(canvas) & seen, width),
            tracked=select.columns(self.tracked & seen, min(self.track * self.spec.num_layers, canvas.length)),
            known=seen & ~canvas.masked,
            live=~canvas.done,
            columns=seen.sum(1),
        )

    @override
    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        assert isinstance(plan, ElasticPlan) and self.slots is not None
        if index == 0:
            self._begin(hidden, rope, plan)
        if self.wide:
            rope = self.rope
            self.inputs[index][:, :-1] = hidden = torch.where(
                (plan.chosen | (self.refresh_from < index)[:, None])[:, :-1, None], hidden, self.inputs[index][:, :-1]
            )
        else:
            put(self.inputs[index], plan.positions, hidden)
        q, k, v = parts.qkv(hidden, rope)
        if index == len(self.queries):
            self.queries.append(q.new_zeros(len(q), self.slots.columns, q.shape[1], q.shape[3]))
        mask = None if plan.keys is None else plan.keys[:, None, None]
        columns = self.slots.columns - (mask is None)
        compares = not plan.contiguous and index < self.spec.num_layers - 1  # what was computed whole is fresh
        before = None
        if compares:
            before = parts.weights(self._stored(index, plan.tracked), self.slots.read(index, columns)[0], mask)
        self._write(index, q, k, v, plan)
        k, v = self.slots.read(index, columns)
        hidden = hidden + parts.attend(q, k, v, mask)
        hidden = hidden + parts.mlp(hidden)

        watched = parts.weights(self._stored(index, plan.watched), k, mask)  # [B, H, R, S]
        self.tracked = self.tracked | self.most_attended(watched, plan)
        if before is not None:
            now = parts.weights(self._stored(index, plan.tracked), k, mask)  # [B, H, T, S]
            moved = (self.similarity(before, now, plan) < self.gamma) & plan.live
            self.refresh_from = torch.where(moved, self.refresh_from.clamp(max=index + 1), self.refresh_from)
            if not self.wide and bool(moved.any()):
                self.wide = True
                everything = self.inputs[index + 1].clone()
                put(everything, plan.positions, hidden)
                return everything[:, :-1]
        if self.wide and not plan.contiguous and index == self.spec.num_layers - 1:
            at = plan.positions.clamp(max=hidden.shape[1] - 1)  # back to what was planned
            return hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[2]))
        return hidden

    def _begin(self, hidden: Tensor, rope: Any, plan: ElasticPlan) -> None:
        """Prepare for the first layer of a forward: a whole one refreshes every layer, and others none so far."""
        self.wide = plan.contiguous
        self.refresh_from = torch.full_like(self.refresh_from, -1 if plan.contiguous else self.spec.num_layers)
        self.tracked = torch.zeros_like(self.tracked)
        if plan.contiguous:  # as a generation's first forward is
            self.rope = rope
        if not self.inputs:
            shape = (len(hidden), plan.chosen.shape[1], hidden.shape[2])
            self.inputs = [hidden.new_zeros(shape) for _ in range(self.spec.num_layers)]

    def _write(self, index: int, q: Tensor, k: Tensor, v: Tensor, plan: ElasticPlan) -> None:
        """Store `q [B, H, M, Dh]` and `k, v [B, Hkv, M, Dh]`. A wide layer stores only what each row needs."""
        assert self.slots is not None
        if not self.wide:
            self.slots.write(index, k, v, plan.slots)
            put(self.queries[index], plan.positions, q.transpose(1, 2))
            return
        fresh = (plan.chosen | (self.refresh_from <= index)[:, None])[:, :-1, None, None]
        for stored, new in ((self.slots.keys, k), (self.slots.values, v), (self.queries, q)):
            old = stored[index][:, :-1]
            old.copy_(torch.where(fresh, new.transpose(1, 2).to(old.dtype), old))

    def _stored(self, index: int, columns: Tensor) -> Tensor:
        """Return stored queries `[B, H, R, Dh]` of layer `index` at `columns [B, R]`."""
        return take(self.queries[index], columns).transpose(1, 2)

    def similarity(self, before: Tensor, now: Tensor, plan: ElasticPlan) -> Tensor:
        """Return `[B]` the mean cosine of two attention maps `[B, H, T, S]` of the tracked tokens."""
        real = (plan.tracked < plan.chosen.shape[1] - 1).double()  # [B, T]
        before, now = (F.normalize(a.to(torch.promote_types(a.dtype, torch.float32)), dim=-1) for a in (before, now))
        # A cosine without cancellation. That of equal maps is exactly 1 in every batch.
        alike = (1 - (before - now).square().sum(-1) / 2).mean(1).double()  # [B, T]
        return (alike * real).sum(1) / real.sum(1)

    def most_attended(self, weights: Tensor, plan: ElasticPlan) -> Tensor:
        """Return `[B, L+1] bool` decoded columns that the watched rows look at most, by `weights [B, H, R, S]`."""
        real = (plan.watched < plan.chosen.shape[1] - 1).to(weights.dtype)[:, None, :, None]
        mass = (weights * real).sum((1, 2)).double()  # [B, S]
        # The first layer looks at all end-of-text tokens alike if their embedding is 0, as that of padding is.
        mass = significant(mass, weights.dtype)
        mass = F.pad(mass, (0, plan.known.shape[1] - mass.shape[1]))
        return select.top(mass, plan.known, torch.full_like(self.refresh_from, self.track))

    @override
    def cost(self, plan: Plan) -> Tensor:
        assert isinstance(plan, ElasticPlan)
        layers = self.spec.num_layers
        reused = self.refresh_from.clamp(min=0)
        total = plan.entries * reused + plan.columns * (layers - reused)
        return ((total + layers - 1) // layers) * plan.live  # rounded up

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.stale = written(canvas, query, edit)
