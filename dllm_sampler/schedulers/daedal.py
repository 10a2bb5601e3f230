"""DAEDAL: an answer grows until the model sees its end, and where the model is unsure."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_share
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Resize
from dllm_sampler.schedulers.lengthening import Lengthening


@dataclass(frozen=True)
class Daedal(Lengthening):
    """DAEDAL around another scheduler: the answer grows before decoding, and where the model is unsure while decoding.

        canvas = initial masks
        while signal(model(canvas)) < grow:
            append expand masks
        append eos_tokens // 2 end-of-text tokens
        while masks remain:
            prediction = model(canvas)
            commit inner(canvas, prediction)
            q = the least sure mask that is left in the block
            if signal(prediction) < insert and confidence at q < unsure:
                insert expand - 1 masks after q

    Source: DAEDAL, arXiv 2508.00819, the rule of its code. The signal is the sum of the probabilities of the last
    `eos_tokens` predicted end-of-text tokens, divided by `eos_tokens`. `max_new_tokens` is a bound: nothing is appended
    beyond it, and an insertion cuts off at the right what exceeds it. Blocks are windows that begin where the one
    before ended. Deviations: the published function commits above its threshold. Here the inner scheduler decides, and
    the mask token is never chosen. The published function ends all rows of a batch together, and fails under guidance.
    Here guidance masks the prompt.

    Args:
        inner, initial, expand, eos_tokens: see `Lengthening`.
        grow: signal to reach before decoding begins. With 0 no masks are appended.
        insert: signal from which on nothing is inserted. With 0 nothing ever is.
        unsure: confidence of the least sure mask below which masks are inserted after it.
    """

    grow: float = 0.5
    insert: float = 0.9
    unsure: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("grow", "insert", "unsure"):
            check_share(f"scheduler.{name}", getattr(self, name), "a probability")

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B] bool` rows that have not begun to decode, and the inner scheduler's carry."""
        return ~canvas.done, super().init(canvas)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. Forwards may commit nothing, and a cut may remove commits."""
        return super().bound(tokens) + 1 + -(-max(0, tokens - self.initial) // self.expand) + self.expand

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        early, before = carry  # [B]
        ready = ~early
        edit, inner = self.inner.tell(canvas, query, readout, before)
        signal, room = self.signal(canvas, query, readout), canvas.end < canvas.layout.answer_end
        grows, (behind, count) = early & room & (signal < self.grow), self._gap(canvas, query, readout, edit)
        count = count * (ready & room & (signal < self.insert))
        more = torch.where(grows, self.expand, self.eos_tokens // 2)
        resize = Resize(
            end=canvas.end + torch.where(early, more, count),
            ids=torch.where(grows, self.mask, self.end_ids[0]),
            masked=grows,
            behind=behind,
            count=count,
            reopen=early,
        )
        close = None if edit.close_block is None else edit.close_block & ready
        commit = edit.commit & ready[:, None] & (edit.ids != self.mask)  # under `compat` it may be chosen
        edit = replace(edit, commit=commit, close_block=close, resize=resize)
        over = ~canvas.apply(query.positions, edit).masked.any(1)  # after the last mask there are end-of-text tokens
        edit = replace(edit, finish=over if edit.finish is None else (edit.finish | over) & ready)
        return edit, (grows, where_rows(ready, inner, before, canvas.length))

    def _gap(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> tuple[Tensor, Tensor]:
        """Return `[B]` the least sure mask left in the block, the first of equals, and `[B]` masks to insert there."""
        left = canvas.eligible(query.positions) & ~edit.commit
        sure = readout.confidence[:, 0].masked_fill(~left, torch.inf)
        least, at = sure.min(1)
        return query.positions.gather(1, at[:, None])[:, 0], (self.expand - 1) * (least < self.unsure)
