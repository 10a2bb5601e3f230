"""From logits to what matters of each class of tokens. Letters: G tiles of tokens, C classes (see `edges.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from dllm_sampler.core.statistics import argmax, argmax_in_tiles, rows_at_once, tile_tops
from dllm_sampler.guides.forms.edges import Edges


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
        parts, every, mains = _Parts.of(edges, logits), [], []
        for rows, into in parts:
            every.append(tile_tops(rows))
            parts.gather(rows, into)
            if edges.main >= 0:
                mains.append(tile_tops(parts.main(rows)))
        tiles, free = parts.tiles.amax(2), argmax_in_tiles(logits, torch.cat(every))
        classes = best(tiles, edges.tile_kind, floor(tiles, len(edges.sizes), False))
        if not mains:
            return Tops(tiles, classes, free)
        tops = torch.cat(mains)
        classes[:, edges.main] = top = tops.amax(1)
        token = argmax_in_tiles(logits, tops, edges.outside)
        # Where all are forbidden, the first token stands for them.
        return Tops(tiles, classes, free, token.masked_fill(top == -torch.inf, edges.first))

    def token(self, edges: Edges, logits: Tensor, kind: Tensor) -> Tensor:
        """`[R]` the first token of the class `kind [R]` with its best logit, also if another guide forbids them all."""
        top = self.classes.gather(1, kind[:, None])  # [R, 1]
        tile = argmax(((self.tiles == top) & (edges.tile_kind == kind[:, None])).view(torch.uint8))
        tokens = edges.tiles.index_select(0, tile).long()  # [R, TILE]
        inside = (logits.gather(1, tokens) == top).view(torch.uint8).argmax(1, keepdim=True)
        found = tokens.gather(1, inside)[:, 0]
        return found if self.main is None else torch.where(kind == edges.main, self.main, found)


def masses(edges: Edges, logits: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`[R, C+2]` the best logit of each class, and float64 logarithm of its sum of exp(logits), of logits `[R, V]`.

    Args:
        near: `[R]` tokens of the class `Edges.main` that are not much less likely than its best one, which stand for
            it; None: look for the best ones.
    """
    parts, tops, shares, size = _Parts.of(edges, logits), [], [], len(edges.sizes)
    known = repeat(None) if near is None else near[:, None].split(len(parts.room))
    for (rows, into), token in zip(parts, known, strict=False):
        if edges.main >= 0:
            main = parts.main(rows)
            tops.append(main.amax(1, keepdim=True) if token is None else main.gather(1, token))
            share = _log_shares(main)
            shares.append(share.amax(1, keepdim=True) if token is None else share.gather(1, token))
        parts.gather(rows, into)
    tiles = parts.tiles.add_(edges.padding).amax(2)
    classes = best(tiles, edges.tile_kind, floor(tiles, size, False))
    sums = _sums(tiles, _log_shares(parts.tiles).amax(2))
    mass = total(sums, edges.tile_kind, floor(sums, size, True))
    if tops:
        top, share = torch.cat(tops)[:, 0], torch.cat(shares)[:, 0]
        classes[:, edges.main], mass[:, edges.main] = top, _sums(top, share)
    return classes, mass


def _log_shares(logits: Tensor) -> Tensor:
    """`[..., T]` log_softmax of `logits [..., T]`, in their place where they are precise enough."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits, -1, dtype=precise, out=logits if logits.dtype == precise else None)


def _sums(logit: Tensor, log_share: Tensor) -> Tensor:
    """Float64 logarithm of sums of exp(logits), each from one of its logits and that logit's log_softmax."""
    return (logit.double() - log_share.double()).masked_fill_(logit == -torch.inf, -torch.inf)


@dataclass(frozen=True)
class _Parts:
    """Logits, split into parts of as many rows as a CPU's cache has room for, and buffers for what is read of them."""

    edges: Edges
    logits: Tensor  # [R, V]
    tiles: Tensor  # [R, G, TILE] the logits of each tile's tokens, where `gather` has put them
    room: Tensor  # [T, V] for `main`
    outside: Tensor  # [V] `Edges.outside` in the logits' dtype

    @staticmethod
    def of(edges: Edges, logits: Tensor) -> _Parts:
        """The parts of logits `[R, V]`."""
        room = logits.new_empty(rows_at_once(logits), logits.shape[1])
        tiles = logits.new_empty(len(logits), *edges.tiles.shape)
        return _Parts(edges, logits, tiles, room, edges.outside.to(logits.dtype))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part's logits `[T, V]` and tiles `[T, G, TILE]`."""
        size = len(self.room)
        return zip(self.logits.split(size), self.tiles.split(size), strict=True)

    def main(self, rows: Tensor) -> Tensor:
        """`[T, V]` -inf but for tokens of the class `Edges.main`; in a buffer that the next part uses again."""
        return torch.add(rows, self.outside, out=self.room[: len(rows)])

    def gather(self, rows: Tensor, into: Tensor) -> None:
        """Put the logits of the tiles' tokens into their place."""
        torch.index_select(rows, 1, self.edges.tiles.view(-1), out=into.flatten(1))
