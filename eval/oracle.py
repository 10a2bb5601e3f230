"""The oracle: how few forwards would do, if every prediction that is already final could be told from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context, Denoiser, Scheduler, is_random
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.result import Result, Trace
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
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
        """The oracle of a batch whose answers are there, in one trace or several."""
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
        """No state; refuses a batch that is not the reference's."""
        given = (canvas.ids.shape[0], canvas.layout.longest)
        if given != tuple(self.answer.shape):
            rows, tokens = self.answer.shape
            raise UserError(
                "length-mismatch",
                f"This oracle has {rows} answers of {tokens} tokens, not {given[0]} of {given[1]}. Make another.",
            )

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at = (query.positions - canvas.layout.first[:, None]).clamp(0, self.answer.shape[1] - 1)  # [B, Q]
        answer, order = self.answer.gather(1, at), self.order.gather(1, at)
        known = canvas.eligible(query.positions) & (order >= 0)
        right = known & (readout.token[:, 0] == answer)
        forced = top(-order.double(), known, torch.ones_like(canvas.start)) & ~right.any(1, keepdim=True)
        return Edit(answer, right | forced), carry


def decode(
    denoiser: Denoiser,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **plugins: object,
) -> tuple[Result, Result]:
    """One token per step, and the oracle that reproduces it: both results of a batch.

    Args:
        plugins: `blocks`, `stop`, `cache`, `guide`, the same for both.

    Raises:
        UserError: a stop that decides by predictions, which are other ones where tokens come earlier, or a guide
            under which tokens are drawn: a draw is not the same at another step.
    """
    reference = Sampler(denoiser, scheduler=FixedSteps(), tokenizer=tokenizer, **plugins)  # type: ignore[arg-type]
    stop, predicts = reference.plugins.stop, getattr(reference.plugins.stop, "mode", None) == "predicted"
    if predicts or not isinstance(stop, LEGAL_STOPS):
        raise UserError(
            "stop-incompatible",
            f"The oracle does not support stop={named(stop)}, which reads predictions. Use stop=prefix.",
        )
    if is_random(reference.plugins.guides):
        raise UserError("options-conflict", "The oracle needs greedy decoding. Remove the temperature.")
    one_by_one = reference.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)
    oracle = Sampler(denoiser, scheduler=Oracle.of(one_by_one.trace), tokenizer=tokenizer, **plugins)  # type: ignore[arg-type]
    return one_by_one, oracle.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)
