"""Token editing as in the published code of LLaDA2.1 and T2M."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.editing import TokenEditing


@dataclass(frozen=True)
class PublishedEditing(TokenEditing):
    """Token editing that spends one more forward on a full block, even if no token can be edited.

    Source: LLaDA2.1, arXiv 2602.08676.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, made = super().tell(canvas, query, readout, carry)
        if self.edit < 1:
            return edit, made
        left = canvas.eligible(query.positions).any(1)
        return replace(edit, keep_block=left & (made < self.extra)), made


@dataclass(frozen=True)
class PublishedRemasking(TokenEditing):
    """Token editing that resets its counts of remasks in each step that finds no committed token in the block.

    Source: the code of T2M, arXiv 2604.18738. The reset is meant for a block's first step. It also happens after all
    tokens were remasked, so that `remask_limit` does not bound the remasks.

    Args:
        eos: a full block with this token ends at once, without another forward to check it. None means no token.
    """

    eos: int | None = None

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, suspects = super().tell(canvas, query, readout, carry)
        none = ~(canvas.inside(query.positions) & ~canvas.eligible(query.positions)).any(1, keepdim=True)
        suspects = suspects._replace(taken=suspects.taken.masked_fill(none, 0))
        if self.eos is None:
            return edit, suspects
        assert edit.keep_block is not None
        after = canvas.apply(query.positions, edit)
        ends = (after.in_block() & ~after.layout.frozen & (after.ids == self.eos)).any(1) & (after.noise_left() == 0)
        return replace(edit, keep_block=edit.keep_block & ~ends), suspects


@dataclass
class UnrefreshedBlocks(BlockCausalCache):
    """A block-causal cache that stores a block from its last forward, which still saw masks in it.

    Source: the code of T2M, arXiv 2604.18738, for blocks that end because of `extra`.
    """

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        super().observe(canvas, query, edit, readout)
        over = canvas.apply(query.positions, edit).block_over(edit)
        self.clean = torch.where(over & ~canvas.done, canvas.grid_end(), self.clean)
