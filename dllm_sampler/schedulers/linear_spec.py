"""Linear self-speculation: a model with a causal context drafts a window at once and verifies it token by token."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.spec import CausalQueries, LeftToRightVerifier, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.s2d2 import drafting_for, upto_failure
from dllm_sampler.schedulers.threshold import Threshold


class Draft(NamedTuple):
    """The drafted tokens of the block, which the scheduler carries from step to step."""

    ids: Tensor  # [B, L+1]
    known: Tensor  # [B, L+1] bool: columns that have a drafted token


@dataclass(frozen=True)
class LinearSpec(Threshold):
    """Linear self-speculation: the block is drafted as diffusion, and verified by the same model, autoregressively.

        while masks remain:
            while a mask of the block, other than the last, has no draft:
                token, confidence = model(canvas with the draft)
                draft the masks with confidence >= threshold, or else the surest
            said = model(canvas with the draft), causally
            commit said from the left, up to and with the first unlike its draft
            begin the next block at the last committed token

    Source: Nemotron-Labs-Diffusion (`linear_spec_generate`). The causal forward predicts each token from those before
    it. The last position has no draft: only this forward predicts it. So an answer is that of the model read
    autoregressively: greedy, or, where tokens are drawn, a sample. Blocks of one position draft nothing: that is plain
    autoregressive decoding. The published `block_length` does not count the last position, and its prompt is a forward
    by itself.

    Args:
        threshold: a forward drafts the masks whose probability reaches it, at least the best. With 0 one forward drafts
            all.
    """

    threshold: float = 0.0
    position_temperature: float = field(init=False, default=0.0)  # the verifier commits from the left

    @property
    def traits(self) -> Traits:
        """Traits of a rule that queries drafts, and commits the tokens that a causal forward predicts."""
        facts = replace(super().traits, asks_block=False, needs_every_position=True, drafts=True, own_tokens=True)
        facts = replace(facts, ranks_by_confidence=False, scope="model")
        return facts.adding(CausalQueries(), LeftToRightVerifier())

    def bind(self, context: Context) -> Self:
        """Return a bound copy. Refuses models without a causal context, and blocks that another rule shortens."""
        name = f"scheduler={named(self)}"
        if context.spec.attention != "causal_context":
            raise UserError(
                "scheduler-incompatible",
                f"{name} needs a model with a causal context (Nemotron-Labs-Diffusion), which this model does not have."
                f" Use scheduler={drafting_for(context.spec)}.",
            )
        if context.blocks.sizes_on_open:
            raise UserError(
                "scheduler-incompatible",
                f"{name} moves the ends of blocks, and so does blocks={named(context.blocks)}. Use blocks=fixed.",
            )
        return super().bind(context)

    @override
    def init(self, canvas: Canvas) -> Draft:
        return Draft(torch.zeros_like(canvas.ids), torch.zeros_like(canvas.masked))

    def missing(self, canvas: Canvas, carry: Draft) -> Tensor:
        """Return `[B, L+1] bool` masks that wait for a draft. A row without one verifies. No row predicts column 0."""
        column, last = canvas.columns(), canvas.stop[:, None] - 1
        return canvas.masked & canvas.in_block() & ((column < last) | (column == 0)) & ~carry.known

    def ask(self, canvas: Canvas, carry: Draft) -> Query:
        """Return a query about the block with its draft.

        Rows that verify see no masks. Rows that draft see no mask after those to be drafted.
        """
        query, verifies = Query.masks(canvas), ~self.missing(canvas, carry).any(1)
        ids = torch.where(carry.known, carry.ids, canvas.ids).gather(1, query.positions)
        drafted = replace(canvas, masked=canvas.masked & ~carry.known)
        limit = torch.where(verifies, drafted.frontier(), (canvas.stop - 1).clamp(min=1))
        return replace(query, ids=ids[:, None], limit=limit, keeps_positions=True, causal=verifies)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Draft) -> tuple[Edit, Carry]:
        missing, at, token = self.missing(canvas, carry), query.positions, readout.token[:, 0]
        verifies, sure = ~missing.any(1)[:, None], readout.confidence[:, 0]
        fills = at_least_one(sure >= self.threshold, sure, missing.gather(1, at))
        said = torch.where(at > 0, token, query.ids[:, 0])
        edit = Edit(said, upto_failure(canvas.eligible(at), said == query.ids[:, 0]) & verifies)
        first = canvas.apply(at, edit).frontier()  # the next round's first mask
        stop = torch.where(first < canvas.end, first - (canvas.layout.lookahead > 1).long(), canvas.stop)
        place = at.masked_fill(~fills, canvas.length)
        known = carry.known.scatter(1, place, fills) | carry.known
        draft = Draft(carry.ids.scatter(1, place, token), known & ~verifies)
        return replace(edit, stop=torch.where(verifies[:, 0], stop, canvas.stop)), draft

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. A round commits at least one token, and drafts up to one per forward."""
        return tokens * (2 if self.threshold <= 0 else tokens + 1)
