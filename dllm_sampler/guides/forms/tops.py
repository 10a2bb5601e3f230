"""From logits to what matters of each class of tokens. Letters: G tiles of tokens, C classes (see `edges.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.statistics import argmax
from dllm_sampler.guides.forms.edges import Edges

CACHE = 2**20  # logits that a CPU works on at once: its time goes into buffers that it has not touched yet


def best(values: Tensor, index: Tensor, least: Tensor) -> Tensor:
    """`[..., S]` the highest of the values `[..., I]` with each `index`; no less than `least [..., S]`, see `floor`.

    Args:
        index: `[I]`, or of the values' shape.
    """
    return least.scatter_reduce(-1, index if index.dim() == values.dim() else index.expand_as(values), values, "amax")


def total(values: Tensor, index: Tensor, least: Tensor) -> Tensor:
    """`[..., S]` the logarithm of the sum of exp(values `[..., I]`) with each `index`; `least` see `floor`."""
    index = index if index.dim() == values.dim() else index.expand_as(values)
    top = best(values, index, least)
    weight = torch.zeros_like(top).scatter_add_(-1, index, (values - top.gather(-1, index)).exp_())
    return weight.log_().add_(top)


def floor(values: Tensor, size: int, several: bool) -> Tensor:
    """`[..., size]` what `best` of the lists `values [..., I]` starts from; `several`: what `total` does.

    It is finite for a sum: a sum of nothing must not become NaN.
    """
    least = torch.finfo(values.dtype).min if several else -torch.inf
    return values.new_full((*values.shape[:-1], size), least)


@dataclass(frozen=True)
class Tops:
    """The best logits of each class of tokens.

    Most of the classes are small, and their tokens are gathered in tiles. One that more than half of the tokens have,
    such as all that may stand in a string, is looked at in place: a pass over the logits takes less than gathering.
    """

    tiles: Tensor  # [R, G] of each tile
    classes: Tensor  # [R, C+2]
    free: Tensor  # [R] the first token of all with the best logit
    main: Tensor | None = None  # [R] the same of the class `Edges.main`; None: there is no such class

    @staticmethod
    def of(edges: Edges, logits: Tensor) -> Tops:
        """Those of logits `[R, V]`."""
        parts = []
        for rows in logits.split(rows_at_once(logits)):  # each pass over these rows finds them in a cache
            main = () if edges.main < 0 else _best(rows + edges.outside.to(rows.dtype))
            parts.append((_tiled(edges, rows).amax(2), argmax(rows), *main))
        tiles, free, *main = (torch.cat(part) for part in zip(*parts, strict=True))
        classes = best(tiles, edges.tile_kind, floor(tiles, len(edges.sizes), False))
        if not main:
            return Tops(tiles, classes, free)
        token, classes[:, edges.main] = main
        none = classes[:, edges.main] == -torch.inf  # all are forbidden: the first token stands for them
        return Tops(tiles, classes, free, token.masked_fill(none, edges.first))

    def token(self, edges: Edges, logits: Tensor, kind: Tensor) -> Tensor:
        """`[R]` the first token of the class `kind [R]` with its best logit, also if another guide forbids them all."""
        top = self.classes.gather(1, kind[:, None])  # [R, 1]
        tile = argmax(((self.tiles == top) & (edges.tile_kind == kind[:, None])).view(torch.uint8))
        tokens = edges.tiles.index_select(0, tile).long()  # [R, TILE]
        place = (logits.gather(1, tokens) == top).view(torch.uint8).argmax(1, keepdim=True)
        found = tokens.gather(1, place)[:, 0]
        return found if self.main is None else torch.where(kind == edges.main, self.main, found)


def masses(edges: Edges, logits: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`[R, C+2]` the best logit of each class, and float64 logarithm of its sum of exp(logits), of logits `[R, V]`.

    Args:
        near: `[R]` tokens of the class `Edges.main` that are not much less likely than its best one, which stand for
            it; None: look for the best ones.
    """
    parts, size = [], rows_at_once(logits)
    for begin, rows in enumerate(logits.split(size)):
        known = None if near is None else near[begin * size : (begin + 1) * size]
        main = () if edges.main < 0 else _mass(rows + edges.outside.to(rows.dtype), known)
        parts.append((*_tile_masses(edges, rows), *main))
    tiles, sums, *main = (torch.cat(part) for part in zip(*parts, strict=True))
    size = len(edges.sizes)
    classes = best(tiles, edges.tile_kind, floor(tiles, size, False))
    mass = total(sums, edges.tile_kind, floor(sums, size, True))
    if main:
        classes[:, edges.main], mass[:, edges.main] = main
    return classes, mass


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits `[R, V]` are worked on at once."""
    return max(1, CACHE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


def _tiled(edges: Edges, logits: Tensor) -> Tensor:
    """`[R, G, TILE]` the logits of each tile's tokens."""
    return logits.index_select(1, edges.tiles.flatten()).view(len(logits), *edges.tiles.shape)


def _tile_masses(edges: Edges, logits: Tensor) -> tuple[Tensor, Tensor]:
    """`[R, G]` the best of each tile, and float64 logarithm of its sum of exp(logits)."""
    each = _tiled(edges, logits)
    top = each.amax(2)
    each = each.to(torch.promote_types(each.dtype, torch.float32))
    least = top.to(each.dtype).clamp(min=torch.finfo(each.dtype).min)
    mass = each.sub_(least[..., None]).exp_().mul_(edges.filled).sum(2)
    return top, mass.double().log_().add_(least)


def _best(own: Tensor) -> tuple[Tensor, Tensor]:
    """`[R]` the first token with the best logit of `own [R, V]`, and that logit."""
    token = argmax(own)
    return token, own.gather(1, token[:, None])[:, 0]


def _mass(own: Tensor, near: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[R]` the best logit of `own [R, V]`, or that of `near [R]`, and float64 logarithm of the sum of exp(own)."""
    token = argmax(own) if near is None else near
    top = own.gather(1, token[:, None])[:, 0]
    precise = torch.promote_types(own.dtype, torch.float32)
    share = torch.softmax(own, 1, dtype=precise, out=own if own.dtype == precise else None)
    # A token's share is exp(logit) / sum of exp(logits): from one that is likely follows the sum.
    mass = top.double() - share.gather(1, token[:, None])[:, 0].double().log()
    return top, mass.masked_fill(top == -torch.inf, -torch.inf)
