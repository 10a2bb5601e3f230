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
    weight: Tensor | None  # [R, C+2] float64 logarithm of the sum of each class's exp(logits)
    main: Tensor | None  # [R] the first token of the class `Edges.main` with its best logit; None: not looked for

    @staticmethod
    def of(edges: Edges, logits: Tensor, weigh: bool = False, near: Tensor | None = None) -> Tops:
        """Those of logits `[R, V]`; `weigh`: their sums too, in place of the best token of the class `Edges.main`.

        Args:
            near: `[R]` tokens of the class `Edges.main` that are not much less likely than its best one, if known.
        """
        parts, size = [], rows_at_once(logits)
        for begin, rows in enumerate(logits.split(size)):
            known = None if near is None else near[begin * size : (begin + 1) * size]
            main = () if edges.main < 0 else _main(edges.outside, rows, weigh, known)
            parts.append((*_tiles(edges, rows, weigh), *main))
        tiles, sums, *main = (torch.cat(part) for part in zip(*parts, strict=True))
        size = len(edges.sizes)
        classes = best(tiles, edges.tile_kind, floor(tiles, size, False))
        weight = total(sums, edges.tile_kind, floor(sums, size, True)) if weigh else None
        if not main:
            return Tops(tiles, classes, weight, None)
        found, classes[:, edges.main] = main
        if weight is None:
            return Tops(tiles, classes, None, found)
        weight[:, edges.main] = found
        return Tops(tiles, classes, weight, None)

    def token(self, edges: Edges, logits: Tensor, kind: Tensor) -> Tensor:
        """`[R]` the first token of the class `kind [R]` with its best logit, also if another guide forbids them all."""
        top = self.classes.gather(1, kind[:, None])  # [R, 1]
        tile = argmax(((self.tiles == top) & (edges.tile_kind == kind[:, None])).view(torch.uint8))
        tokens = edges.tiles.index_select(0, tile).long()  # [R, TILE]
        place = (logits.gather(1, tokens) == top).view(torch.uint8).argmax(1, keepdim=True)
        found = tokens.gather(1, place)[:, 0]
        return found if self.main is None else torch.where(kind == edges.main, self.main, found)


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


def _main(outside: Tensor, logits: Tensor, weigh: bool, near: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[R]` of the tokens for which `outside [V]` is 0 the first best one or the logarithm of their sum; its logit."""
    own = logits + outside.to(logits.dtype)
    token = argmax(own) if near is None else near
    top = own.gather(1, token[:, None])[:, 0]
    if not weigh:
        return torch.where(top == -torch.inf, argmax(outside), token), top
    precise = torch.promote_types(own.dtype, torch.float32)
    share = torch.softmax(own, 1, dtype=precise, out=own if own.dtype == precise else None)
    # A token's share is exp(logit) / sum of exp(logits): from one that is likely follows the sum.
    mass = top.double() - share.gather(1, token[:, None])[:, 0].double().log()
    return mass.masked_fill(top == -torch.inf, -torch.inf), top
