"""Who sees whom, by brute force: a question about one query and one key at a time, and situations to ask it in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.d2f import D2FCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.packing import HeadRows, Pack, forward_request, with_exact_sizes
from dllm_sampler.core.spec import BlocksFrom
from dllm_sampler.core.values import Candidates, Canvas, Grid, Query
from dllm_sampler.core.visibility import Visible
from tests import toys

BLOCKS_FROM: dict[str, BlocksFrom] = {
    "block_causal": "text", "token_causal": "text", "answer": "answer", "whole_prompt": "whole_prompt"
}  # fmt: skip
KINDS = ("bidirectional", *BLOCKS_FROM, "causal_context", "d2f")
LENGTH = 9


@dataclass(frozen=True)
class Situation:
    """One forward. `stored` says if keys and values of earlier forwards are there."""

    kind: str
    canvas: Canvas
    query: Query
    chosen: Tensor  # [B, L+1] bool: columns to compute
    stored: bool
    block: int  # length of a block on the grid

    def sees(self, row: int, column: int, key: int) -> bool:
        """Return True if the position at `column` may see the column `key` of its row."""
        canvas, query = self.canvas, self.query
        if key >= canvas.end[row] or (query.limit is not None and key >= query.limit[row]):
            return False
        if query.hidden is not None and query.hidden[row, key]:
            return False
        start, stop = int(canvas.start[row]), int(canvas.stop[row])
        if self.kind == "causal_context" and not key < (stop if start <= column < stop else column + 1):
            return False
        origin = int(canvas.layout.first[row]) if self.kind in ("answer", "whole_prompt", "d2f") else 0
        on_grid = self.kind not in ("bidirectional", "causal_context")
        if on_grid and self._number(key, origin) > self._number(column, origin):
            return False
        first, last = start, stop
        if self.canvas.layout.grid is not None:
            first = next(at for at in range(start, -1, -1) if (at - origin) % self.block == 0)
            last = min(first + self.block, int(canvas.end[row]))
        by_token = query.causal is not None and bool(query.causal[row])
        if by_token and first <= column < last and key > column:
            return False
        if self.kind == "token_causal":
            noise = [at for at in range(start, LENGTH) if canvas.masked[row, at]]
            known = noise[0] if noise else int(canvas.end[row])
            if column < (max(known, last) if by_token else known) and key > column:
                return False
        return True

    def _number(self, column: int, origin: int) -> int:
        return -1 if column < origin and self.kind != "answer" else (column - origin) // self.block

    @cached_property
    def visible(self) -> Visible:
        """The bounds that the cache of this kind makes."""
        cache: Any = {"token_causal": BlockCausalCache(token_causal=True), "d2f": D2FCache("block_causal")}.get(
            self.kind, NoCache()
        )
        attention = {**dict.fromkeys(BLOCKS_FROM, "block_causal"), "d2f": "bidirectional"}
        cache.spec = replace(toys.denoiser().spec, attention=attention.get(self.kind, self.kind))
        cache.length = self.block
        return cache.sees(self.canvas, self.query)

    @cached_property
    def pack(self) -> Pack:
        """The entries."""
        spec = toys.denoiser().spec
        wanted = with_exact_sizes(self.canvas, forward_request(self.canvas, self.query, self.chosen, spec))
        return Pack.of(self.canvas, wanted, HeadRows.of(wanted), spec, self.visible)

    def wanted(self) -> list[set[tuple[str, int]]]:
        """Return what each entry sees: stored columns of its row, and fresh entries."""
        pack, found = self.pack, []
        rows, columns = pack.row.tolist(), pack.column.tolist()
        segments = [0] * len(rows) if pack.segment is None else pack.segment.tolist()
        reads_fresh = not self.stored or pack.segment is not None
        entries = [*zip(rows, columns, segments, strict=True)]
        for row, column, segment in entries:
            keys = set[tuple[str, int]]()
            if self.stored:
                again = {other for b, other, _ in entries if b == row} if pack.segment is not None else set[int]()
                keys |= {("stored", at) for at in range(LENGTH) if at not in again and self.sees(row, column, at)}
            for index, (b, other, its) in enumerate(entries if reads_fresh else ()):
                same = segment == its
                if self.query.leave_one_out and segment != 0 and its == 0:  # a shadow sees the canvas but for its place
                    same = other != column
                if b == row and same and self.sees(row, column, other):
                    keys.add(("fresh", index))
            found.append(keys)
        return found

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return queries, keys and values `[T, 1, Dh]` and slots; the values say which key they belong to."""
        entries, batch = len(self.pack.row), len(self.canvas.ids)
        names = torch.eye(LENGTH + 1 + entries)[:, None]
        zero = torch.zeros_like(names[-entries:])
        old = names[: LENGTH + 1].repeat(batch, 1, 1, 1)
        return zero, zero, names[-entries:], (torch.zeros_like(old), old) if self.stored else None

    @staticmethod
    def read(heads: Tensor) -> list[set[tuple[str, int]]]:
        """Return what was seen, from the attention `[T, 1, Dh]` of `inputs`."""
        names = [("stored", at) for at in range(LENGTH + 1)] + [("fresh", at) for at in range(len(heads))]
        return [{names[at] for at in line.nonzero().flatten().tolist()} for line in heads[:, 0]]


def situation(seed: int, kind: str) -> Situation:
    """Draw a forward of one to three rows."""
    draw = Random(seed)
    batch, block = draw.randint(1, 3), draw.randint(1, 4)
    first = [draw.randint(0, 4) for _ in range(batch)]
    end = [draw.randint(at + 1, LENGTH) for at in first]
    start = [draw.randrange(at, over) for at, over in zip(first, end, strict=True)]
    stop = [draw.randint(at + 1, over) for at, over in zip(start, end, strict=True)]

    def flip(share: float = 0.5) -> Tensor:
        return torch.tensor([[draw.random() < share for _ in range(LENGTH)] + [False] for _ in range(batch)])

    masked = flip() & (torch.arange(LENGTH + 1) >= torch.tensor(first)[:, None])
    masked = masked & (torch.arange(LENGTH + 1) < torch.tensor(end)[:, None])
    canvas = toys.canvas(
        masked[:, :-1],
        first=torch.tensor(first),
        end=torch.tensor(end),
        start=torch.tensor(start),
        stop=torch.tensor(stop),
        done=torch.tensor([draw.random() < 0.2 for _ in range(batch)]),
        padded=any(at != LENGTH for at in end),
        grid=Grid(block, blocks_from=BLOCKS_FROM[kind]) if kind in BLOCKS_FROM else None,
    )
    query = Query.window(canvas.with_layout(width=LENGTH))
    stored, form = draw.random() < 0.5, draw.choice(["plain", "drafts", "shadows", "causal shadows", "causal"])
    if form == "drafts":
        count = draw.randint(2, 3)
        live = torch.tensor([[True] + [draw.random() < 0.7 for _ in range(count - 1)] for _ in range(batch)])
        query = replace(query, ids=query.ids.expand(-1, count, -1), candidates=Candidates(live=live))
    if "causal" in form:
        query = replace(query, causal=torch.tensor([draw.random() < 0.7 for _ in range(batch)]))
    query = replace(query, leave_one_out="shadows" in form)
    if draw.random() < 0.3:
        query = replace(query, limit=canvas.stop)
    if draw.random() < 0.3:
        query = replace(query, hidden=flip(0.2) & ~canvas.in_block())
    chosen = flip() | canvas.in_block() if stored else torch.ones_like(masked)
    return Situation(kind, canvas, query, chosen, stored, block)
