"""The oracle: a scheduler that knows the answer and commits every correct prediction at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError, counted
from dllm_sampler.result import Trace
from dllm_sampler.stops.end_tokens import BlockStop, NoStop, PrefixStop, TruncateStop

LEGAL_STOPS = (NoStop, BlockStop, PrefixStop, TruncateStop)  # stops that read only committed tokens


@dataclass(frozen=True)
class Oracle(Scheduler):
    """A scheduler that knows the answer that another one, the reference, has decoded.

    It commits the masks of the block whose candidate is the answer's token. If no candidate is, it writes the answer's
    token at the position that the reference committed first. So every step commits at least one position of the
    reference, and no more steps are needed than with one commit per step. Positions that the reference never committed,
    after its end-of-text token, stay masked.

    The oracle is greedy: an early commit, though correct, can make a neighbour's prediction wrong. Its forwards are
    therefore an upper bound on the fewest possible. A rule that recognises correct predictions and commits all of them
    at once needs as many.

    Args:
        answer: `[B, N]` the reference's tokens, one row per prompt of the batch.
        order: `[B, N]` the reference's forward that committed each token. -1 if none did.
    """

    answer: Tensor
    order: Tensor

    @staticmethod
    def of(*references: Trace) -> Oracle:
        """Return the oracle for the answers of finished traces, one row per answer."""
        answers, orders = [], []
        for trace in references:
            stands = torch.arange(trace.ids.shape[1]) < trace.end[:, None]  # what a stop cut off was not decoded
            answers.append(trace.ids[:, trace.origin :])
            orders.append(torch.where(stands, trace.step_map, -1)[:, trace.origin :])
        return Oracle(torch.cat(answers), torch.cat(orders))

    def bind(self, context: Context) -> Oracle:
        """Return a copy with its tensors on the model's device, so that no step waits for a transfer."""
        device = context.spec.device
        return Oracle(self.answer.to(device), self.order.to(device))

    def init(self, canvas: Canvas) -> Carry:
        """Return None as the state. Raises `UserError` if batch and answers differ in shape."""
        given = (canvas.ids.shape[0], canvas.layout.longest)
        if given != tuple(self.answer.shape):
            rows, tokens = self.answer.shape
            raise UserError(
                "length-mismatch",
                f"The oracle is for {counted(rows, 'answer')} of {counted(tokens, 'token')}, and this batch has"
                f" {given[0]} of {given[1]}."
                " Make an oracle with Oracle.of from the traces of this batch.",
            )

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at = (query.positions - canvas.layout.first[:, None]).clamp(0, self.answer.shape[1] - 1)  # [B, Q]
        answer, order = self.answer.gather(1, at), self.order.gather(1, at)
        known = canvas.eligible(query.positions) & (order >= 0)
        right = known & (readout.token[:, 0] == answer)
        forced = top(-order.double(), known, torch.ones_like(canvas.start)) & ~right.any(1, keepdim=True)
        return Edit(answer, right | forced), carry
