"""From logits to what matters of each class of tokens. Letters: G tiles of tokens, C classes (see `edges.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.statistics import argmax
from dllm_sampler.guides.forms.edges import Edges

CACHE = 2**20  # logits that a CPU works on at once: its time goes into buffers that it has not touched yet


def best(values: Tensor, index: Tensor, nothing: Tensor) -> Tensor:
    """`[..., S]` the highest of the values `[..., I]` with each `index [..., I]`; `nothing [..., S]` is -inf."""
    return nothing.scatter_reduce(-1, index.expand_as(values), values, "amax")


def total(values: Tensor, index: Tensor, nothing: Tensor) -> Tensor:
    """`[..., S]` logarithm of the sum of exp(values `[..., I]`) with each `index [..., I]`; `nothing` is -inf."""
    index = index.expand_as(values)
    top = best(values, index, nothing).clamp(min=torch.finfo(values.dtype).min)
    weight = torch.zeros_like(top).scatter_add_(-1, index, (values - top.gather(-1, index)).exp_())
    return weight.log_().add_(top)


def lowest(values: Tensor, size: int) -> Tensor:
    """`[..., size]` -inf for the lists `values [..., I]`."""
    return values.new_full((*values.shape[:-1], size), -torch.inf)


@dataclass(frozen=True)
class Tops:
    """The best logits of each class of tokens."""

    tiles: Tensor  # [R, G] of each tile
    classes: Tensor  # [R, C+2]
    weight: Tensor | None  # [R, C+2] float64 logarithm of the sum of each class's exp(logits)

    @staticmethod
    def of(edges: Edges, logits: Tensor, weigh: bool = False) -> Tops:
        """Those of logits `[R, V]`; `weigh`: their sums too."""
        parts = [_tiles(edges, part, weigh) for part in logits.split(rows_at_once(logits))]
        tiles, sums = (torch.cat(part) for part in zip(*parts, strict=True))
        size = len(edges.sizes)
        weight = total(sums, edges.tile_kind, lowest(sums, size)) if weigh else None
        return Tops(tiles, best(tiles, edges.tile_kind, lowest(tiles, size)), weight)

    def token(self, edges: Edges, logits: Tensor, kind: Tensor) -> Tensor:
        """`[R]` the first token of the class `kind [R]` with its best logit, also if another guide forbids them all."""
        top = self.classes.gather(1, kind[:, None])  # [R, 1]
        tile = argmax(((self.tiles == top) & (edges.tile_kind == kind[:, None])).view(torch.uint8))
        tokens = edges.tiles.index_select(0, tile).long()  # [R, TILE]
        place = (logits.gather(1, tokens) == top).view(torch.uint8).argmax(1, keepdim=True)
        return tokens.gather(1, place)[:, 0]


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits `[R, V]` are worked on at once."""
    return max(1, CACHE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


def _tiles(edges: Edges, logits: Tensor, weigh: bool) -> tuple[Tensor, Tensor]:
    """`[R, G]` the best of each tile, and float64 logarithm of its sum of exp(logits)."""
    each = logits.index_select(1, edges.tiles.flatten()).view(len(logits), *edges.tiles.shape)
    top = each.amax(2)
    if not weigh:
        return top, top
    each = each.to(torch.promote_types(each.dtype, torch.float32))
    least = top.to(each.dtype).clamp(min=torch.finfo(each.dtype).min)
    mass = each.sub_(least[..., None]).exp_().mul_(edges.filled).sum(2)
    return top, mass.double().log_().add_(least)
