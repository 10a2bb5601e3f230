"""Attention probabilities of the last layers, which some schedulers read, computed beside an unchanged forward."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.core.visibility import Visible, visible
from dllm_sampler.models.fused import Fused
from dllm_sampler.models.transformer import Drive, Layer, Rope

ROOM = 2**24  # attention probabilities that are in memory at once


@dataclass
class Watching:
    """A `Drive` that measures attention in the last layers, and lets another `Drive` run all layers.

    Args:
        inner: the `Drive` that runs the layers.
        plan: plan of a forward that computes all columns of each row. The means are added up in `plan.means`.
        canvas: the state before the step.
        query: one candidate.
        sees: the columns that each column sees.
        layers: number of the model's layers.
    """

    inner: Drive
    plan: Plan
    canvas: Canvas
    query: Query
    sees: Visible
    layers: int
    seen: Tensor = field(init=False)  # [B, 1 or C, C] bool: keys that each column sees, C = L + 1
    places: Tensor = field(init=False)  # [B, C] index of each column in the query. Q for other columns

    def __post_init__(self) -> None:
        columns, at = self.canvas.columns(), self.query.positions
        self.seen = visible(self.canvas, self.query)[:, None]
        if self.sees.until is not None:
            self.seen = self.seen & (columns < self.sees.until[..., None])
        place = columns[:, : at.shape[1]].expand_as(at)
        self.places = torch.full_like(self.canvas.ids, at.shape[1]).scatter(1, at, place)

    def __call__(self, index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None) -> Tensor:
        """Run a layer as a `Drive` does. In the last layers, add its attention to `plan.means`."""
        means = self.plan.means
        assert means is not None
        count = min(means.layers, self.layers)
        if index >= self.layers - count:
            feed = self.inner.feed if isinstance(self.inner, Fused) else None  # what the stream still lacks
            normed = layer.attn_norm(hidden if feed is None else hidden + feed)
            attention, attended = self.measure(layer, layer.q(normed, rope), layer.k(normed, rope))
            for name, share in (("attention", attention / count), ("attended", attended / count)):
                before = getattr(means, name)
                setattr(means, name, share if before is None else before + share)
        return self.inner(index, layer, hidden, rope, rows)

    def measure(self, layer: Layer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Readout.attention [B, 1, Q, C]` and `Readout.attended [B, 1, C]` of one layer, C = L + 1.

        Args:
            layer: the layer, for its `weights`.
            q: `[1, H, T, Dh]` queries of the pack.
            k: `[1, Hkv, T, Dh]` keys of the pack.
        """
        q, k = self.rows(q), self.rows(k)
        batch, heads, columns, _ = q.shape
        width = self.query.positions.shape[1]
        found, total = q.new_zeros(batch, width + 1, columns), q.new_zeros(batch, columns)
        exists = visible(self.canvas, self.query)
        size = max(1, ROOM // (batch * heads * columns))
        for begin in range(0, columns, size):
            some = slice(begin, begin + size)
            seen = self.seen if self.seen.shape[1] == 1 else self.seen[:, some]
            share = layer.weights(q[:, :, some], k, seen[:, None]).mean(1)  # [B, size, C]
            total += (share * exists[:, some, None]).sum(1)
            found.scatter_(1, self.places[:, some, None].expand_as(share), share)
        return found[:, None, :-1], (total / exists.sum(1, keepdim=True))[:, None]

    def rows(self, heads: Tensor) -> Tensor:
        """Return the pack's `heads [1, H, T, Dh]` by row and column, `[B, H, C, Dh]`, in at least float32."""
        pack, (batch, columns) = self.plan.pack, self.canvas.ids.shape
        assert pack is not None
        flat = heads[0].transpose(0, 1).to(torch.promote_types(heads.dtype, torch.float32))  # [T, H, Dh]
        placed = flat.new_zeros(batch * columns, *flat.shape[1:]).index_copy(0, pack.slots, flat)
        return placed.unflatten(0, (batch, columns)).transpose(1, 2)
