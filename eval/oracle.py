"""The oracle: how few forwards would do, if every prediction that is already final could be told from the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.result import Trace
from dllm_sampler.stops.end_tokens import BlockStop, NoStop, PrefixStop, TruncateStop

LEGAL_STOPS = (NoStop, BlockStop, PrefixStop, TruncateStop)  # they look at nothing but committed tokens


@dataclass(frozen=True)
class Oracle(Scheduler):
    """Commit the masks of the block whose candidate is the token of a known answer.

    If no candidate is, the position that the reference committed first is written from the answer.
    Every step commits one position at least that the reference spent a forward on, so it is never slower than one
    commit per step. Positions that the reference left undecided, after its end token, stay so.

    It is greedy: a token committed early, though right, can turn a neighbour's prediction wrong, and a step that
    leaves it out could be the start of a shorter decoding. So its forwards are an upper bound on the fewest possible
    ones, and what a rule that recognises final predictions and commits all of them would need.

    Args:
        answer: `[B, N]` the reference's tokens, one row per prompt of the batch.
        order: `[B, N]` the reference's forward that committed each, -1 for never.
    """

    answer: Tensor
    order: Tensor

    @staticmethod
    def of(*references: Trace) -> Oracle:
        """Return the oracle of a batch whose answers are there, in one trace or several."""
        answers, orders = [], []
        for trace in references:
            stands = torch.arange(trace.ids.shape[1]) < trace.end[:, None]  # what a stop cut off was not decoded
            answers.append(trace.ids[:, trace.origin :])
            orders.append(torch.where(stands, trace.step_map, -1)[:, trace.origin :])
        return Oracle(torch.cat(answers), torch.cat(orders))

    def bind(self, context: Context) -> Oracle:
        """Take the answer to the model's device: no step should wait for it."""
        device = context.spec.device
        return Oracle(self.answer.to(device), self.order.to(device))

    def init(self, canvas: Canvas) -> Carry:
        """Return no state. Refuses a batch that is not the reference's."""
        given = (canvas.ids.shape[0], canvas.layout.longest)
        if given != tuple(self.answer.shape):
            rows, tokens = self.answer.shape
            raise UserError(
                "length-mismatch",
                f"The oracle is for {rows} answers of {tokens} tokens, and this batch has {given[0]} of {given[1]}."
                " Make one by Oracle.of from the traces of this batch.",
            )

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at = (query.positions - canvas.layout.first[:, None]).clamp(0, self.answer.shape[1] - 1)  # [B, Q]
        answer, order = self.answer.gather(1, at), self.order.gather(1, at)
        known = canvas.eligible(query.positions) & (order >= 0)
        right = known & (readout.token[:, 0] == answer)
        forced = top(-order.double(), known, torch.ones_like(canvas.start)) & ~right.any(1, keepdim=True)
        return Edit(answer, right | forced), carry
