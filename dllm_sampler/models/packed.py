"""Attention of a pack in torch: each entry sees the columns of its own row that it may see."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core.packing import Pack
from dllm_sampler.core.visibility import fresh_seen, stored_seen
from dllm_sampler.kernels import reference

Stored = tuple[Tensor, Tensor]  # keys and values [B, L+1, Hkv, Dh]


@dataclass
class PackedAttention:
    """Attention for one pack, made once per forward and used by every layer.

    On a CPU, if the host knows the rows of the pack, it computes row by row. A row's numbers then do not depend on its
    neighbours. Otherwise it pads all rows to the longest one, for this product alone.
    """

    pack: Pack
    masks: list[Tensor | None] | None = field(init=False, default=None)  # made by the first layer

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None) -> Tensor:
        """Return heads `[1, H, T, Dh]` of queries of that shape over keys and values `[1, Hkv, T, Dh]` and stored ones.

        If there are slots, those of the entries contain their keys and values already.
        """
        if q.device.type == "cpu" and self.pack.sizes.rows is not None:
            return self._by_row(q, k, v, stored)
        return self._padded(q, k, v, stored)

    @cached_property
    def _live(self) -> list[tuple[int, int, int]]:
        """Row, number of entries and first hidden column, for each row that has entries."""
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
                # Slots may be wider than the computation: they are float32 under FSDP's bfloat16 mixed precision.
                old = [one[row : row + 1, :end].transpose(1, 2).to(q.dtype) for one in stored]
                both = zip(old, (keys, values), strict=True)
                keys, values = (torch.cat(parts, 2) for parts in both) if reads_fresh else old
            grouped = query.shape[1] != keys.shape[1]
            heads.append(F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=grouped))
        return heads[0] if len(heads) == 1 else torch.cat(heads, 2)

    def _masks(self, stored: bool) -> list[Tensor | None]:
        """Return the mask `[n, S] bool` of each live row, or None for rows that see all. Layers share the masks."""
        if self.masks is None:
            found, at = [], 0
            for row, count, end in self._live:
                found.append(self._mask(row, slice(at, at + count), end, stored))
                at += count
            self.masks = found
        return self.masks

    def _mask(self, row: int, own: slice, end: int, stored: bool) -> Tensor | None:
        """Return `[n, S] bool` keys that the entries `own` of a row see, or None if they see all."""
        pack, parts = self.pack, []
        if pack.segment is None and pack.until is None and (pack.unread is None or not stored):
            return None
        column = pack.column[None, own]
        until = pack.end[row].expand_as(column) if pack.until is None else pack.until[None, own]
        if stored:
            parts.append(stored_seen(until, end, None if pack.unread is None else pack.unread[row : row + 1, :end]))
        if pack.segment is not None or not stored:
            segment, unseen = (None if one is None else one[None, own] for one in (pack.segment, pack.unseen))
            parts.append(fresh_seen(until, column, segment, unseen))
        return torch.cat(parts, 2)[0]

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None) -> Tensor:
        pack, fresh = self.pack, stored is None or self.pack.segment is not None
        heads = reference.attention(
            q[0].transpose(0, 1),
            k[0].transpose(0, 1) if fresh else None,
            v[0].transpose(0, 1) if fresh else None,
            stored,
            pack.bounds,
            pack.column,
            end=pack.end,
            until=pack.until,
            segment=pack.segment,
            unseen=pack.unseen,
            unread=pack.unread,
            longest=pack.sizes.longest,
        )
        return heads.transpose(0, 1)[None]


def _split(heads: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Return `[1, H, T, Dh]` split along T into a tensor for each count."""
    return heads.split(counts, 2) if len(counts) > 1 else [heads]
