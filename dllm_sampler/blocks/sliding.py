"""A window that slides with its first mask."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.multi_block import check_sees_masks_after
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.protocols import Blocks, Context
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class SlidingBlocks(Blocks):
    """A window over the first masks, in which a step may commit. It moves to the right as they are committed.

    Source: DSB, arXiv 2602.05992 (`greedy`; `constant` is `max_width=masks`), and DCD, arXiv 2601.02076
    (`until_end=true`). The window begins at the first mask. It ends after the last of its masks. A mask that is hard to
    decide is never forced by the end of a block: it waits, and the window grows to the right.

    Args:
        masks: number of masks in the window. The last windows of an answer have fewer.
        max_width: most columns of the window. None means no limit, so that the window always has `masks` masks.
        until_end: end the window before the first committed end-of-text token. A row ends when no mask is left before
            it.

    Raises:
        UserError: in `bind`, for models that do not see masks after the block.
    """

    slides: ClassVar[bool] = True

    masks: int = 32
    max_width: int | None = None
    until_end: bool = False
    end_ids: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("blocks.masks", self.masks)
        check_count("blocks.max_width", self.max_width, optional=True)

    @override
    def bind(self, context: Context) -> Self:
        check_sees_masks_after(self, context)
        return with_bound_fields(self, end_ids=context.spec.eos_ids)

    @override
    def lookahead(self, tokens: int) -> int:
        return min(self.masks, self.widest(tokens))

    @override
    def widest(self, tokens: int) -> int:
        return min(self.max_width or tokens, tokens)

    @override
    def move(self, after: Canvas) -> tuple[Tensor, Tensor]:
        column, start, end = after.columns(), after.frontier(), after.end
        if self.until_end:
            ended = is_end(after.ids, self.end_ids) & ~after.masked & ~after.layout.frozen
            end = torch.minimum(end, torch.where(ended, column, end[:, None]).amin(1))
        last = after.masked & (after.masked.cumsum(1) == self.masks)  # no mask is before the window
        stop = torch.where(last, column + 1, end[:, None]).amin(1)
        if self.max_width is not None:
            stop = torch.minimum(stop, start + self.max_width)
        start = torch.where(start < end, start, after.end)
        return torch.where(after.done, after.start, start), torch.where(after.done, after.stop, stop)
