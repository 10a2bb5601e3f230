"""Forwards that only store keys and values, around any scheduler. Used by `cache.store_pass=separate`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Candidates, Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class StorePass(AroundWithState):
    """A scheduler around another one, with a forward that stores the prompt and one that stores each finished block.

    Source: SDAR's published loop, arXiv 2510.06303. A prompt without a full block is not stored. These forwards commit
    nothing, and the inner scheduler does not see them.

    Args:
        inner: the scheduler of all other forwards.
    """

    @property
    def stands_for(self) -> Scheduler:
        """The scheduler that the user named."""
        return self.inner

    @override
    def init(self, canvas: Canvas) -> Carry:
        # The carry of the inner scheduler, [B] the block is over once it is full, [B] it is over now, [B] forwards that
        # only stored, [B] begin of the first block.
        no = torch.zeros_like(canvas.done)
        return super().init(canvas), no, no, torch.zeros_like(canvas.step), canvas.start

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, asks_block=False)  # a forward that only stores queries no position

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        canvas, _, idle = self._counted(canvas, *carry[1:])
        query = super().ask(canvas, carry).drop(canvas, ~idle[:, None].expand_as(canvas.masked))
        # Noise is keyed by the steps that the inner scheduler counts. Drafts have their own numbers.
        single = query.candidates.step is None and query.ids.shape[1] == 1
        return replace(query, candidates=Candidates(step=canvas.step[:, None])) if single else query

    @override
    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        canvas, _, idle = self._counted(canvas, *carry[1:])
        ahead = super().ahead(canvas, carry)
        return None if ahead is None else ahead.masked_fill(idle[:, None], 0)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        canvas, due, idle = self._counted(canvas, *carry[1:])
        edit, inner = self.inner.tell(canvas, query, readout, carry[0])
        over = canvas.apply(query.positions, edit).block_over(edit) & ~idle & (canvas.stop == canvas.grid_end())
        left = over & (torch.zeros_like(over) if edit.close_block is None else edit.close_block)
        edit = replace(
            edit,
            commit=edit.commit & ~idle[:, None],
            remask=None if edit.remask is None else edit.remask & ~idle[:, None],
            keep_block=torch.where(idle, ~due, over if edit.keep_block is None else over | edit.keep_block),
            close_block=due | left,
            finish=None if edit.finish is None else edit.finish & ~idle,
            end=None if edit.end is None else torch.where(idle, canvas.end, edit.end),
        )
        inner = where_rows(~idle, inner, carry[0], canvas.length)
        return edit, (inner, over, left, carry[3] + idle, carry[4])

    @override
    def bound(self, tokens: int) -> int:
        return super().bound(tokens) + tokens + 1  # a forward per block, and one for the prompt

    @staticmethod
    def _counted(
        canvas: Canvas, over: Tensor, left: Tensor, made: Tensor, begun: Tensor
    ) -> tuple[Canvas, Tensor, Tensor]:
        """Return the canvas with the inner scheduler's steps, `[B] bool` rows that store a block, and rows that idle.

        A row idles if its forward only stores a block or the prompt. The arguments are the state in the carry.
        """
        assert canvas.layout.grid is not None
        prefilled = canvas.grid_line(begun, canvas.layout.grid.length) > 0
        late = prefilled & (canvas.start == begun)
        # A block may be full when it opens. A part of a block is not stored, since a later part may change it.
        over = over | (canvas.age == 0) & (canvas.stop == canvas.grid_end())
        due = left | (over & (canvas.noise_left() == 0))  # a committed mask token is still noise
        idle = due | (prefilled & (canvas.step == 0))
        return replace(canvas, age=(canvas.age - late.long()).clamp(min=0), step=canvas.step - made), due, idle
