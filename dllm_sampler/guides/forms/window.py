"""The part of an answer that a choice goes through position by position, and tables for the rest.

Letters as in `choice.py`: N strings, L positions of an answer, S states, C classes of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.packing import HeadRows, stretch
from dllm_sampler.core.values import Canvas
from dllm_sampler.guides.forms.edges import Edges
from dllm_sampler.guides.forms.tops import best, floor, total

MOST = 2**23  # most numbers of a table. With more, a choice goes through every position
ROOM = 2**21  # most numbers of moves that are computed at once


@dataclass(frozen=True)
class Window:
    """The positions of an answer that a choice goes through one by one.

    Positions before it are committed. Positions after it are masks that the step does not query.
    """

    begin: Tensor  # [N]
    width: int  # W
    length: int  # L
    behind: Tensor  # [N] positions after it that the row has

    @staticmethod
    def of(edges: Edges, canvas: Canvas, head_rows: HeadRows) -> Window:
        """Return the window of each candidate of a query's rows. Its width is known without reading the device."""
        length, wide, query = canvas.layout.longest, head_rows.stretch, head_rows.query
        fits = edges.accepts.numel() * length <= MOST
        width = min(wide, length) if wide is not None and fits else length
        begin = torch.zeros_like(canvas.layout.first)
        if width < length:
            begin = stretch(canvas, query.positions)[0].clamp(max=length - width)
        behind = (canvas.end - canvas.layout.first - begin - width).clamp(min=0)
        candidates = query.ids.shape[1]
        return Window(begin.repeat_interleave(candidates, 0), width, length, behind.repeat_interleave(candidates, 0))

    @property
    def whole(self) -> bool:
        """True if the window has all positions."""
        return self.width == self.length

    def cut(self, values: Tensor) -> Tensor:
        """Return `[N, W, ...]` the window of values `[N, L, ...]` (or more positions)."""
        if self.whole:
            return values[:, : self.length]
        at = self.begin[:, None] + select.arange(self.width, values.device)
        return values.gather(1, at.view(*at.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:]))

    def places(self, place: Tensor) -> Tensor:
        """Return positions `[N, Q]` counted from the window's first one, and W for positions outside."""
        if self.whole:
            return place
        inside = place - self.begin[:, None]
        return inside.where((inside >= 0) & (inside < self.width), self.width)

    def entered(self, edges: Edges, form: Tensor, token: Tensor) -> Tensor:
        """Return `[N]` the state after the tokens `[N, L]` before the window, or S if they fit nowhere."""
        state = edges.start.index_select(0, form)[:, None]
        if self.whole:
            return state[:, 0]
        size = edges.after.shape[2]
        before = select.arange(self.length, token.device) < self.begin[:, None]
        kind = torch.where(before, edges.classes[token], edges.stays) + form[:, None] * edges.after.shape[1]
        for part in kind.split(max(1, ROOM // (len(kind) * size)), 1):
            ways = edges.after.flatten(0, 1).index_select(0, part.flatten()).view(*part.shape, size).long()
            while ways.shape[1] > 1:  # [N, T, S+1]: two neighbours become one
                last = ways[:, ways.shape[1] // 2 * 2 :]
                ways = torch.cat([ways[:, 1::2].gather(2, ways[:, : ways.shape[1] // 2 * 2 : 2]), last], 1)
            state = ways[:, 0].gather(1, state)
        return state[:, 0]

    def left(self, edges: Edges, form: Tensor, several: bool) -> Tensor:
        """Return `[N, S]` 0 for the states that a string after the window may follow, and -inf for others.

        With `several` it is the logarithm of the number of these strings. Positions after the window have no logits, so
        each token there has the value 0.
        """
        if self.whole:
            return _ends(edges).index_select(0, form)
        table = _tails(edges, several, self.length)  # [P, L', S]
        return table.flatten(0, 1).index_select(0, form * table.shape[1] + self.behind)


def _ends(edges: Edges) -> Tensor:
    """Return `[P, S]` 0 for the states in which a string may end, and -inf for others."""
    return torch.zeros_like(edges.accepts, dtype=torch.float64).where(edges.accepts, -torch.inf)


def _tails(edges: Edges, several: bool, length: int) -> Tensor:
    """Return `[P, L', S]` 0 for the states that a string of 0, 1, ... positions may follow, and -inf for others.

    With `several` it is the logarithm of the number of these strings. L' is above `length`. The table is
    made once for lengths up to a power of two. It is never freed before the edges, since a recorded step reads it in
    place.
    """
    most = 1 << (length - 1).bit_length()
    if (several, most) in edges.tails:
        return edges.tails[several, most]
    with torch.inference_mode(False):
        reduce, found = total if several else best, [_ends(edges)]
        weight = (edges.sizes if several else edges.sizes.clamp(max=0)).expand(len(edges.kind), -1)
        each = weight.gather(1, edges.kind)
        along = reduce(each, edges.edge, floor(each, edges.source.shape[1], several))
        least = floor(found[0], found[0].shape[1], several)
        for _ in range(most):
            found.append(reduce(along + found[-1].gather(1, edges.target), edges.source, least))
        edges.tails[several, most] = torch.stack(found, 1)
    return edges.tails[several, most]
