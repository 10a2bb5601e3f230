"""When the loops of SDAR, LLaDA2 and FreeDave end a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import BlockStop, PrefixStop, with_finish


@dataclass(frozen=True)
class StopAt(BlockStop):
    """`BlockStop` for any of several tokens.

    Source: SDAR's loop, arXiv 2510.06303.
    """

    tokens: tuple[int, ...] = ()

    @override
    def ends(self, after: Canvas) -> Tensor:
        found = torch.zeros_like(after.masked)
        for token in self.tokens:
            found |= after.ids == token
        return found & ~after.masked & ~after.layout.frozen & after.seen()


@dataclass(frozen=True)
class EarlyStop(PrefixStop):
    """As `PrefixStop`, but the published loop looks only when a step commits an end token, and after each block.

    It looks for the first end token from the prompt's first token on: one in the prompt has no mask before it.
    Source: LLaDA2's loop, arXiv 2512.15745.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        before, edit = edit.finish, super().__call__(canvas, after, query, readout, edit)
        assert edit.finish is not None
        committed = (edit.commit & is_end(edit.ids, self.end_ids)).any(1)  # [B]
        looks = committed | after.block_over(edit)
        asked = (is_end(canvas.ids, self.end_ids) & (canvas.columns() < canvas.layout.first[:, None])).any(1)
        finish = edit.finish & looks | asked & committed
        return replace(edit, finish=finish if before is None else before | finish)


@dataclass(frozen=True)
class PromptCounts(BlockStop):
    """As `BlockStop`, and an end token of the prompt counts in the block that it is in.

    Source: the code of DMax, arXiv 2604.08302.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        ends = is_end(after.ids, self.end_ids) & ~after.masked & canvas.in_grid_block()
        return with_finish(edit, after.block_over(edit) & ends.any(1))


@dataclass(frozen=True)
class AllEnd(BlockStop):
    """A block of nothing but end tokens, its part of the prompt included, ends the row.

    Source: the early exit of FreeDave's loops, arXiv 2510.00294.

    Args:
        drafting: a loop that does not look where the forward that opens a block finds it full.
    """

    drafting: bool = False

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        columns = canvas.columns()
        first = canvas.grid_start()
        outside = (columns < first[:, None]) | (columns >= canvas.stop[:, None])
        over = after.block_over(edit) & (outside | is_end(after.ids, self.end_ids) & ~after.masked).all(1)
        return replace(edit, finish=over & (canvas.age > 0) if self.drafting else over)
