"""D2F's pipeline: several blocks open at once, and nothing after them."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.multi_block import MultiBlock
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class Pipeline(MultiBlock):
    """Blocks that are decoded side by side as in `MultiBlock`, while the model does not see blocks that are not open.

    Source: D2F, arXiv 2508.09192, as in the code of LoPA, arXiv 2512.16229. Once an end-of-text token is committed no
    more blocks open. The open ones are decoded to their ends, and then the row ends.

    Args:
        length, add_threshold, full_threshold: see `MultiBlock`.
    """

    hides: ClassVar[bool] = True

    full_threshold: float | None = 0.95
    end_ids: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(super().bind(context), end_ids=context.spec.eos_ids)

    @override
    def move(self, after: Canvas) -> tuple[Tensor, Tensor]:
        start, stop = super().move(after)
        over = self.ended(after) & ~(after.masked & (after.columns() < after.stop[:, None])).any(1)
        return torch.where(over, after.end, start), torch.where(over, after.stop, stop)

    @override
    def adds(self, after: Canvas) -> Tensor:
        return super().adds(after) & ~self.ended(after)

    def ended(self, after: Canvas) -> Tensor:
        """Return `[B] bool` rows with a committed end-of-text token."""
        return (is_end(after.ids, self.end_ids) & ~after.masked & ~after.layout.frozen).any(1)
