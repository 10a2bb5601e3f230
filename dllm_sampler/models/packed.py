"""Attention of a pack in torch: each entry sees the columns of its own row that it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.packing import Pack
from dllm_sampler.core.visibility import Visible

Stored = tuple[Tensor, Tensor]  # keys and values [B, L+1, Hkv, Dh]


@dataclass
class PackedAttention:
    """Attention for one pack; made once per forward, used by every layer.

    On a CPU, where the host knows the rows of the pack, it goes from row to row, so that a row's numbers do not depend
    on its neighbours. Elsewhere it pads all rows to the longest one, for this product alone.

    Args:
        pack: the entries.
        visible: which columns of its row an entry may see.
    """

    pack: Pack
    visible: Visible
    masks: list[Tensor | None] | None = field(init=False, default=None)  # made by the first layer

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None) -> Tensor:
        """Heads `[1, H, T, Dh]` of queries `[1, H, T, Dh]` over keys and values `[1, Hkv, T, Dh]` and stored ones.

        Keys and values of the entries are in their slots already, where there are any.
        """
        if q.device.type == "cpu" and self.pack.sizes.rows is not None:
            return self._by_row(q, k, v, stored)
        return self._padded(q, k, v, stored)

    @cached_property
    def _live(self) -> list[tuple[int, int, int]]:
        """Row, entries and end of each row that has entries."""
        assert self.pack.sizes.rows is not None
        return [(row, *bounds) for row, bounds in enumerate(self.pack.sizes.rows) if bounds[0]]

    def _by_row(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None) -> Tensor:
        if not self._live:
            return torch.zeros_like(q)  # one filler
        counts, heads = [count for _, count, _ in self._live], []
        reads_fresh = stored is None or self.pack.segment is not None
        fresh = zip(_split(k, counts), _split(v, counts), strict=True) if reads_fresh else repeat((k, v))
        masks = self._masks(stored is not None)
        for (row, _, end), query, (keys, values), mask in zip(
            self._live, _split(q, counts), fresh, masks, strict=False
        ):
            if stored is not None:
                old = [_as(one[row : row + 1, :end].transpose(1, 2), q.dtype) for one in stored]
                both = zip(old, (keys, values), strict=True)
                keys, values = (torch.cat(parts, 2) for parts in both) if reads_fresh else old
            heads.append(_attend(query, keys, values, mask))
        return heads[0] if len(heads) == 1 else torch.cat(heads, 2)

    def _masks(self, stored: bool) -> list[Tensor | None]:
        """What the entries of each live row see, `[n, S] bool`; None: all of it. The same in every layer."""
        if self.masks is None:
            found, at = [], 0
            for row, count, end in self._live:
                found.append(self._mask(row, slice(at, at + count), end, stored))
                at += count
            self.masks = found
        return self.masks

    def _mask(self, row: int, own: slice, end: int, stored: bool) -> Tensor | None:
        """`[n, S] bool` what the entries `own` of a row see; None: all of it."""
        pack, parts = self.pack, []
        if pack.segment is None and self.visible.all and (pack.unread is None or not stored):
            return None
        column = pack.column[own]
        if stored:
            old = torch.arange(end, device=column.device)  # [S]
            sees = self._in_block(column, old, row)
            if pack.unread is not None:
                sees = sees & ~pack.unread[row, :end]
            parts.append(sees)
        if pack.segment is not None or not stored:
            parts.append(self._in_block(column, column, row) & _together(pack, own))
        return torch.cat(parts, 1)

    def _in_block(self, column: Tensor, key: Tensor, row: int) -> Tensor:
        """`[n, S] bool` which of the columns `key [S]` of a row the model's blocks show to those at `column [n]`."""
        until = self.visible.until(column, row)
        if until is None:
            return torch.ones(len(column), len(key), dtype=torch.bool, device=column.device)
        return key[None] < until[:, None]

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None) -> Tensor:
        pack, width = self.pack, self.pack.sizes.longest
        at = pack.bounds[:-1, None] + select.numbers(width, q.device)  # [B, M]
        real = at < pack.bounds[1:, None]
        at = at.clamp(max=q.shape[2] - 1)
        column = pack.column[at]  # [B, M]
        parts, keys, values = [], [], []
        end, found = self.visible.end[:, None], self.visible.until(column)
        until = end[..., None] if found is None else found
        until = until[..., None] if until.dim() == 2 else until.expand(-1, width, -1)  # [B, M, 1]
        if stored is not None:
            old = select.numbers(stored[0].shape[1], q.device)  # [L+1]
            sees = old < end  # [B, L+1]
            if pack.unread is not None:
                sees = sees & ~pack.unread
            parts.append(sees[:, None] & (old < until))
            keys.append(stored[0].transpose(1, 2).to(q.dtype))
            values.append(stored[1].transpose(1, 2).to(q.dtype))
        if stored is None or pack.segment is not None:
            sees = real[:, None] & (column[:, None] < until)
            if pack.segment is not None:
                segment = pack.segment[at]
                sees = sees & _of_a_kind(pack, segment, column, None if pack.unseen is None else pack.unseen[at])
            parts.append(sees)
            keys.append(k[0][:, at].transpose(0, 1))  # [B, Hkv, M, Dh]
            values.append(v[0][:, at].transpose(0, 1))
        mask = torch.cat(parts, 2)  # [B, M, S]
        mask = mask | ~mask.any(2, keepdim=True)  # a filler sees anything, so that no NaN arises
        out = _attend(q[0][:, at].transpose(0, 1), torch.cat(keys, 2), torch.cat(values, 2), mask[:, None])
        entry = select.numbers(q.shape[2], q.device)
        place = (pack.row * width + entry - pack.bounds[pack.row]).clamp(max=at.numel() - 1)
        heads = out.transpose(1, 2).flatten(0, 1)[place]  # [T, H, Dh]
        heads = heads.masked_fill((entry >= pack.bounds[-1])[:, None, None], 0)
        return heads.transpose(0, 1)[None]


def _as(heads: Tensor, dtype: torch.dtype) -> Tensor:
    # Stored keys may be wider than the computation: slots are float32 under FSDP's bfloat16 mixed precision.
    return heads if heads.dtype == dtype else heads.to(dtype)


def _split(heads: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """`[1, H, T, Dh]` as one tensor for each count."""
    return heads.split(counts, 2) if len(counts) > 1 else [heads]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def _together(pack: Pack, own: slice) -> Tensor:
    """`[n, n] bool` which entries of a row see each other."""
    if pack.segment is None:
        return torch.ones((), dtype=torch.bool, device=pack.column.device)
    unseen = None if pack.unseen is None else pack.unseen[None, own]
    return _of_a_kind(pack, pack.segment[None, own], pack.column[None, own], unseen)[0]


def _of_a_kind(pack: Pack, segment: Tensor, column: Tensor, unseen: Tensor | None) -> Tensor:
    """`[B, M, M] bool` which entries see each other, of `segment`, `column` and `unseen [B, M]`."""
    same = segment[:, :, None] == segment[:, None]
    if unseen is None:
        return same
    shadow = segment != 0
    return same | (shadow[:, :, None] & ~shadow[:, None] & (unseen[:, :, None] != column[:, None]))
