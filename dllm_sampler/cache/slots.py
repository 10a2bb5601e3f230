"""The store of keys and values that caches keep between forwards."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from dllm_sampler.core.spec import ModelSpec


class Slots:
    """Keys and values of every column, in one buffer per layer that is written in place.

    Buffers of zeros are made on first use, so a generation that takes over another's buffers (`engine/graphs.py`) makes
    none.
    """

    def __init__(self, spec: ModelSpec, batch: int, columns: int):
        self.spec, self.columns = spec, columns
        self.shape = (batch, columns, spec.num_kv_heads, spec.head_dim)

    @cached_property
    def keys(self) -> list[Tensor]:
        """Keys `[B, L+1, Hkv, Dh]` of each layer."""
        return self._buffers()

    @cached_property
    def values(self) -> list[Tensor]:
        """Values `[B, L+1, Hkv, Dh]` of each layer."""
        return self._buffers()

    @cached_property
    def flat(self) -> list[tuple[Tensor, Tensor]]:
        """Views `[B*(L+1), Hkv, Dh]` of each layer's keys and values."""
        return [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.keys, self.values, strict=True)]

    def _buffers(self) -> list[Tensor]:
        spec = self.spec
        return [torch.zeros(self.shape, dtype=spec.dtype, device=spec.device) for _ in range(spec.num_layers)]

    @property
    def untouched(self) -> bool:
        """True if no buffer was made yet."""
        return not {"keys", "values"} & vars(self).keys()

    def take(self, other: Slots, rows: Tensor) -> None:
        """Copy all rows of `other` to `rows [n]` of these slots."""
        if self.untouched and other.untouched:
            return
        mine = self.keys + self.values
        its = [0.0] * len(mine) if other.untouched else other.keys + other.values
        for buffer, fresh in zip(mine, its, strict=True):
            buffer[rows] = fresh

    def copy_rows(self, sources: Tensor, rows: Tensor) -> None:
        """Overwrite `rows [n]` with `sources [n]` of these slots."""
        for buffer in () if self.untouched else self.keys + self.values:
            buffer[rows] = buffer[sources]

    def store(self, index: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store `k, v [1, Hkv, T, Dh]` of a pack in layer `index`, at `slots [T]` counted over all rows."""
        for buffer, fresh in zip(self.flat[index], (k, v), strict=True):
            buffer.index_copy_(0, slots, fresh[0].transpose(0, 1).to(buffer.dtype))

    def write(self, index: int, k: Tensor, v: Tensor, slots: Tensor | None) -> None:
        """Store `k, v [B, Hkv, M, Dh]` in layer `index`, at `slots [B*M]` or by default from column 0 on."""
        pairs = zip((self.keys[index], self.values[index]), self.flat[index], (k, v), strict=True)
        for buffer, flat, fresh in pairs:
            fresh = fresh.transpose(1, 2)  # [B, M, Hkv, Dh]
            if slots is None:
                buffer[:, : fresh.shape[1]] = fresh
            else:
                flat.index_copy_(0, slots, fresh.flatten(0, 1).to(buffer.dtype))

    def read(self, index: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return views `[B, Hkv, columns, Dh]` of the first `columns` keys and values of layer `index`."""
        return self.keys[index][:, :columns].transpose(1, 2), self.values[index][:, :columns].transpose(1, 2)
