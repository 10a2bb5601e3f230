"""The block cache of Fast-dLLM v2, which computes only the decoded part of a block."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass
class SubBlockCache(BlockCausalCache):
    """Fast-dLLM v2's cache for blocks that are decoded in parts.

        computes   the part of the block that is decoded
        reuses     earlier blocks, and older keys and values of the other parts
        refreshes  the block, while the part begins with a mask, and when full

    Source: Fast-dLLM v2, arXiv 2509.26328 (`use_block_cache`). Earlier blocks are stored as by `block_causal`. The
    whole block is computed by its first forward, while the first position of the decoded part is a mask, and once it
    is full. Keys of the block's other parts are stale in between, so answers may differ from those of `block_causal`.
    Blocks that are not decoded in parts (`blocks.part`) are computed as by `block_causal`.
    """

    keeps_noise: ClassVar[bool] = True
    steady: ClassVar[bool] = False  # slots depend on when a part's first position became known

    held: Tensor = field(init=False, repr=False, compare=False)  # [B] first column of the stored block, or -1

    @override
    def begin(self, canvas: Canvas) -> None:
        super().begin(canvas)
        self.held = torch.full_like(canvas.start, -1)

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        chosen = super().computes(canvas)
        grid = canvas.layout.grid
        if grid is None or grid.part is None:
            return chosen
        first = canvas.start - canvas.start % grid.part
        part = (canvas.columns() >= first[:, None]) & (canvas.columns() < canvas.stop[:, None])
        return torch.where(self.whole(canvas, first)[:, None], chosen, chosen & part)

    def whole(self, canvas: Canvas, first: Tensor) -> Tensor:
        """Return `[B] bool` rows whose whole block is computed. The active part begins at `first [B]`."""
        open_ = canvas.masked.gather(1, first[:, None])[:, 0]
        full = ~(canvas.masked & canvas.in_grid_block()).any(1)
        return open_ | full | (self.held != canvas.grid_start())

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        super().observe(canvas, query, edit, readout)
        self.held = torch.where(canvas.done, self.held, canvas.grid_start())
