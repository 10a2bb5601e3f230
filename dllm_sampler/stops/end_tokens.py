"""Stops at a committed end-of-text token. docs/schedulers.md compares the rules."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Context, Stop
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError


def first_of(chosen: Tensor) -> Tensor:
    """Return `[B]` the first true column of `chosen [B, L+1] bool`, or L + 1 if no column is true."""
    size = chosen.shape[1]
    return torch.where(chosen, select.arange(size, chosen.device), size).amin(1)


@dataclass(frozen=True)
class NoStop(Stop):
    """No stop: the whole canvas is decoded, and the text is cut at the first end-of-text token (LLaDA's default)."""


@dataclass(frozen=True)
class _EosStop(Stop):
    end_ids: tuple[int, ...] = field(init=False, default=())

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(self, end_ids=context.spec.eos_ids)

    def ends(self, after: Canvas) -> Tensor:
        """Return `[B, L+1] bool` the committed end-of-text tokens of the generation."""
        return is_end(after.ids, self.end_ids) & ~after.masked & ~after.layout.frozen & after.seen()


def with_finish(edit: Edit, finish: Tensor) -> Edit:
    """Return the edit that also stops the rows `finish [B] bool`."""
    return replace(edit, finish=finish if edit.finish is None else edit.finish | finish)


@dataclass(frozen=True)
class BlockStop(_EosStop):
    """A stop after a complete block that contains an end-of-text token. Everything after the block becomes padding.

    Raises:
        UserError: in `bind`, if several blocks are open at once, or a window slides.
    """

    @override
    def bind(self, context: Context) -> Self:
        if context.blocks.several or context.blocks.slides:
            does = "opens several at once" if context.blocks.several else "slides a window over the answer"
            raise UserError(
                "stop-incompatible",
                f"stop={named(self)} needs blocks that open and end one at a time, and blocks={named(context.blocks)}"
                f" {does}. Use stop=prefix.",
            )
        return super().bind(context)

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        return with_finish(edit, after.block_over(edit) & (self.ends(after) & canvas.in_block()).any(1))


@dataclass(frozen=True)
class PrefixStop(_EosStop):
    """A stop once an end-of-text token is committed and no mask remains before it. No token before it changes.

    With a scheduler that remasks tokens (`edit.remask`) the row stops only once its block is over.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        reached = (after.masked.cumsum(1) == 0) & after.seen() & ~after.layout.frozen
        fire = (reached & is_end(after.ids, self.end_ids)).any(1)
        return with_finish(edit, fire if edit.remask is None else fire & after.block_over(edit))


@dataclass(frozen=True)
class TruncateStop(_EosStop):
    """A cut of the canvas after a committed end-of-text token. The model no longer sees later masks.

    With a scheduler that remasks tokens (`edit.remask`) the canvas is cut only once the block is over.
    """

    cuts: ClassVar[bool] = True

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        end = first_of(self.ends(after)) + 1
        if edit.remask is not None:
            end = torch.where(after.block_over(edit), end, canvas.end)
        return replace(edit, end=end if edit.end is None else torch.minimum(end, edit.end))
