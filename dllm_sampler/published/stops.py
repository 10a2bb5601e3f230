"""Stops of the loops of SDAR, LLaDA2, DMax and FreeDave."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import BlockStop, PrefixStop, with_finish


@dataclass(frozen=True)
class StopAt(BlockStop):
    """`BlockStop` that ends a row at any of `tokens`.

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
    """`PrefixStop` that only checks a row in steps that commit an end-of-text token or finish a block.

    If the prompt contains an end-of-text token, the row ends in the first step that commits another one.
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
    """`BlockStop` that also counts end-of-text tokens of the prompt in the current block.

    Source: the code of DMax, arXiv 2604.08302.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        ends = is_end(after.ids, self.end_ids) & ~after.masked & canvas.in_grid_block()
        return with_finish(edit, after.block_over(edit) & ends.any(1))


@dataclass(frozen=True)
class AllEnd(BlockStop):
    """A stop that ends a row after a block of end-of-text tokens only. Prompt tokens in the block count, too.

    Source: the early exit of FreeDave's loops, arXiv 2510.00294.

    Args:
        drafting: never stop in the first step of a block. FreeDave's drafting loop does the same.
    """

    drafting: bool = False

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        columns = canvas.columns()
        first = canvas.grid_start()
        outside = (columns < first[:, None]) | (columns >= canvas.stop[:, None])
        over = after.block_over(edit) & (outside | is_end(after.ids, self.end_ids) & ~after.masked).all(1)
        return replace(edit, finish=over & (canvas.age > 0) if self.drafting else over)
