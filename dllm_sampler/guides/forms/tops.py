"""Logits of classes of tokens: their best token, and their sum. Letters: G tiles of tokens, C classes (`edges.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core.select import arange
from dllm_sampler.core.statistics import argmax
from dllm_sampler.guides.forms.edges import Edges


def best(values: Tensor, index: Tensor, least: Tensor) -> Tensor:
    """Return `[..., S]` the highest of the values `[..., I]` with each index.

    Args:
        values: `[..., I]`.
        index: `[I]`, or of the values' shape.
        least: `[..., S]` the least that is returned, as `floor` makes it.
    """
    return least.scatter_reduce(-1, index if index.dim() == values.dim() else index.expand_as(values), values, "amax")


def total(values: Tensor, index: Tensor, least: Tensor) -> Tensor:
    """Return `[..., S]` the logarithm of the sum of exp(values `[..., I]`) with each index. See `best`."""
    index = index if index.dim() == values.dim() else index.expand_as(values)
    top = best(values, index, least)
    weight = torch.zeros_like(top).scatter_add_(-1, index, (values - top.gather(-1, index)).exp_())
    return weight.log_().add_(top)


def floor(values: Tensor, size: int, several: bool) -> Tensor:
    """Return `[..., size]` the `least` of `best`, or with `several` that of `total`, for `values [..., I]`.

    That of a sum is finite, since a sum of nothing must not become NaN.
    """
    least = torch.finfo(values.dtype).min if several else -torch.inf
    return values.new_full((*values.shape[:-1], size), least)


class Tops(NamedTuple):
    """The best logits of each class of tokens. The last two classes have -inf, as `Edges` explains."""

    classes: Tensor  # [R, C+2]
    tokens: Tensor  # [R, C+2] the first token of the class with that logit
    free: Tensor  # [R] the first token of all with the best logit

    @staticmethod
    def of(edges: Edges, logits: Tensor) -> Tops:
        """Return the best of logits `[R, V]`.

        Most classes are small, and their tokens are gathered in tiles. A class of more than half of the tokens (for
        example all that a string may contain) is read in place, which takes less time than gathering.
        """
        gathered = _tiles(edges, logits)
        tiles, inside = gathered.amax(2), gathered.argmax(2)  # [R, G]
        classes = best(tiles, edges.tile_kind, floor(tiles, len(edges.sizes), False))
        # The first tile of each class with its best logit.
        last, kind = tiles.shape[1] - 1, edges.tile_kind.expand_as(tiles)
        tile = torch.where(tiles == classes.gather(1, kind), arange(last + 1, tiles.device), last)
        tile = torch.full_like(classes, last, dtype=torch.long).scatter_reduce(1, kind, tile, "amin")
        tokens = edges.tiles.view(-1)[tile * gathered.shape[2] + inside.gather(1, tile)].long()
        classes[:, edges.stays :] = -torch.inf
        if edges.main >= 0:
            own = logits + edges.outside.to(logits.dtype)
            classes[:, edges.main] = top = own.amax(1)
            # If all are forbidden, the first token represents them.
            tokens[:, edges.main] = argmax(own).masked_fill(top == -torch.inf, edges.first)
        return Tops(classes, tokens, argmax(logits))


def masses(edges: Edges, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[R, C+2]` the best of logits `[R, V]` in each class, and the float64 logarithm of their sum of exp."""
    size = len(edges.sizes)
    tiles, sums = _sums(_tiles(edges, logits).add_(edges.padding))  # [R, G]
    classes = best(tiles, edges.tile_kind, floor(tiles, size, False))
    mass = total(sums, edges.tile_kind, floor(sums, size, True))
    if edges.main >= 0:
        classes[:, edges.main], mass[:, edges.main] = _sums(logits + edges.outside.to(logits.dtype))
    return classes, mass


def weighted(edges: Edges, logits: Tensor, least: Tensor, factors: Tensor) -> Tensor:
    """Return logits `[R, V]`, at least `least [R, 1]`, plus the factor `[R, C+2]` of each token's class."""
    return factors.index_select(1, edges.classes).add_(torch.maximum(logits, least))


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest of logits `[..., T]`, and the float64 logarithm of their sum of exp. Overwrites the logits."""
    top = logits.amax(-1)
    finite = top.clamp(min=torch.finfo(top.dtype).min)  # so that -inf minus it is -inf
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return top, logits.sub_(finite[..., None]).exp_().sum(-1).double().log_().add_(top)


def _tiles(edges: Edges, logits: Tensor) -> Tensor:
    """Return `[R, G, TILE]` the logits of each tile's tokens."""
    return logits.index_select(1, edges.tiles.view(-1)).view(len(logits), *edges.tiles.shape)
