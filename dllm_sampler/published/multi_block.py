"""Quirks of d3LLM's published loops."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.multi_block import MultiBlock
from dllm_sampler.cache.delayed_prefix import DelayedPrefix
from dllm_sampler.core.around import AroundWithState
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.protocols import Blocks, Carry, Context, Plan
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.entropy import EntropyThreshold
from dllm_sampler.stops.fill import FillStop


@dataclass(frozen=True)
class StrictEntropy(EntropyThreshold):
    """Entropy threshold without a commit that ensures progress, which `blocks=multi_block` adds.

    Source: d3LLM's Dream loop, arXiv 2601.07568.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.entropy is not None
        unsure = readout.entropy[:, 0]  # [B, Q]
        commit = canvas.eligible(query.positions) & (unsure < self.entropy)
        return Edit(readout.token[:, 0], commit, score=-unsure), carry


@dataclass(frozen=True)
class StaleMasks(AroundWithState):
    """A scheduler that may still commit, for one forward, masks that an end-of-text token has just filled.

    Source: d3LLM's early stop, arXiv 2601.07568, whose loop looks for masks before it fills them. It needs
    `PublishedFill` and `HeldProgress`, since the commit that ensures progress may also be at such a mask.

    Args:
        inner: the scheduler that commits. It sees the filled positions as masks.
    """

    blocks: Blocks | None = field(init=False, default=None, repr=False, compare=False)
    end_ids: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)

    @override
    def bind(self, context: Context) -> Self:
        return with_bound_fields(super().bind(context), blocks=context.blocks, end_ids=context.spec.eos_ids)

    def init(self, canvas: Canvas) -> Carry:
        """Return the inner carry, and `[B, L+1] bool` the masks before the last fill."""
        return super().init(canvas), canvas.masked

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        return super().ask(self._before(canvas, carry[1]), carry)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert isinstance(self.blocks, HeldProgress)
        seen = self._before(canvas, carry[1])
        edit, inner = self.inner.tell(seen, query, readout, carry[0])
        edit = self.blocks.makes_progress(seen, query, readout, edit)
        left = canvas.masked.scatter(1, query.positions, canvas.masked.gather(1, query.positions) & ~edit.commit)
        return edit, (inner, left)

    def _before(self, canvas: Canvas, masked: Tensor) -> Canvas:
        """Return the canvas before the last fill. The block of a row with an end-of-text token reaches to its end."""
        ended = (is_end(canvas.ids, self.end_ids) & ~canvas.masked & ~canvas.layout.frozen & canvas.seen()).any(1)
        stop = torch.where(ended, canvas.end, canvas.stop)
        return replace(canvas, masked=masked, stop=stop)


@dataclass(frozen=True)
class HeldProgress(MultiBlock):
    """`MultiBlock` without a commit that ensures progress, which `StaleMasks` adds by `makes_progress`."""

    @override
    def progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        return edit

    def makes_progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """Return `edit` with the commits that `MultiBlock.progress` adds."""
        return super().progress(canvas, query, readout, edit)


@dataclass(frozen=True)
class PublishedFill(FillStop):
    """`FillStop` that fills nothing once no mask is left on the canvas.

    Source: d3LLM's early stop, arXiv 2601.07568. With `StaleMasks` other tokens may then follow the end-of-text token.
    """

    @override
    def may_fill(self, after: Canvas, edit: Edit) -> Tensor:
        return super().may_fill(after, edit) & after.masked.any(1)


@dataclass
class PublishedDelayedPrefix(DelayedPrefix):
    """d3LLM's cache that computes only columns that are not stored, also on a model with a logit shift.

    Source: d3LLM's Dream loop, arXiv 2601.07568, which shifts the outputs of each forward. The first computed position
    therefore reads its own output, which predicts the next position. It decodes one row.
    """

    unshifted: Tensor | None = field(init=False, default=None, repr=False, compare=False)  # [B, L+1] of this forward

    @property
    @override
    def back(self) -> int:
        return 0

    def recalled(self, canvas: Canvas) -> Tensor | None:
        """Return `[B, L+1] bool` the first computed column, if it is a mask and the forward computes no prompt."""
        whole = self.computes(canvas)[:, :1]
        self.unshifted = (canvas.columns() == self.edge[:, None]) & canvas.masked & ~whole
        return self.unshifted

    def narrow(self, canvas: Canvas, query: Query, predicted: Tensor) -> Query:
        """Return the narrowed query, joined by the position after the unshifted one, since its output is used twice."""
        assert self.unshifted is not None
        after = self.unshifted.roll(1, 1) & predicted
        return super().narrow(canvas, query, predicted).join(canvas, after, canvas.layout.width + 1)

    @override
    def restore(self, hidden: Tensor, plan: Plan) -> Tensor:
        assert self.unshifted is not None
        at, found = plan.head_rows.position, self.unshifted.nonzero()[:, 1]  # one row
        own = hidden[at == found + 1] if len(found) else hidden[:0]
        return torch.where((at == found)[:, None], own[:1], hidden) if len(own) else hidden


@dataclass
class OneAfterAnother(DelayedPrefix):
    """d3LLM's cache whose delays add up: a finished block starts to wait once the blocks before it are stored.

    Source: d3LLM's LLaDA loop, arXiv 2601.07568.
    """

    @override
    def found(self, canvas: Canvas) -> Tensor:
        known, due = (self.since >= 0).sum(1), self._due(canvas, self.since)  # [B]
        limit = torch.where(due == known, torch.minimum(known + canvas.layout.lookahead, canvas.start), known)
        limit = canvas.start if not self.delay else limit
        return torch.where(canvas.columns() < limit[:, None], super().found(canvas), self.since)
