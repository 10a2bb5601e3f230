"""S2D2: a block-diffusion model at block size 1 verifies what it drafted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import LeftToRightVerifier, ShadowRows, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drafting import routing, verify


class Round(NamedTuple):
    """The state of a row between two forwards: its draft, and its progress in the block."""

    length: Tensor  # [B] positions of the block when it was opened
    made: Tensor  # [B] rounds made in this block
    waits: Tensor  # [B] bool: the draft waits for the forward that verifies it
    draft: verify.Draft
    routed: routing.Routed


@dataclass(frozen=True)
class SelfVerified(routing.Routing, verify.Verifying):
    """S2D2: a block-diffusion model drafts a block, and the same model at block size 1 verifies it, where that pays.

        while masks remain in the block:
            draft, confidence = model(canvas)
            if policy says so of the draft:
                law = model(canvas with the draft) at block size 1
                commit the first run of masks from the left while law accepts it,
                    and at the first failure another token, by law
            n = number of masks due in this round, by steps
            commit what is missing to n, as scheduler=dynamic does

    Source: S2D2, arXiv 2603.25702. A verification is one more forward. It predicts each mask from the tokens before it
    alone, drafted ones too, and computes the block and its masks. The published code computes the block twice. If
    decoding is greedy, a draft is accepted if it is the verifier's best token. The published code draws even then
    (`PublishedSelfVerified`). With `cache.token_causal`, a temperature and `steps=null`, if every round is verified, an
    answer is a sample of the model at block size 1.

    Args:
        threshold, steps, score: see `DynamicThreshold`; `steps` counts rounds.
        tempering: see `Verifying`.
        policy, min_span, least, enter, leave, cost, cost_above, estimator, entropy_weight, margin, beta: see
            `Routing`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()

    @property
    def traits(self) -> Traits:
        """Traits of a rule that asks about drafts, by shadows, and commits them a forward later."""
        facts = replace(super().traits, asks_block=False, needs_every_position=True, drafts=True, own_tokens=True)
        return replace(facts, scope="model").adding(ShadowRows(), LeftToRightVerifier())

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | self.routing_needs

    @override
    def init(self, canvas: Canvas) -> Round:
        zero = super().init(canvas)
        return Round(zero, zero, zero > 0, self.undrafted(canvas), self.unrouted(canvas))

    def ask(self, canvas: Canvas, carry: Round) -> Query:
        """Return a query about the block. In rows whose draft waits, it verifies the draft."""
        return self.verifying(canvas, super().ask(canvas, carry), carry.draft, carry.waits & ~canvas.done)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Round) -> tuple[Edit, Carry]:
        assert self.model is not None
        verifies, opens = carry.waits, canvas.age == 0
        length = torch.where(opens, canvas.stop - canvas.start, carry.length)
        canvas = replace(canvas, age=carry.made.masked_fill(opens, 0))
        now, then = self.drafted(canvas, query, readout), carry.draft.at(query.positions)
        token, sure, score = (torch.where(verifies[:, None], *pair) for pair in zip(then[1:4], now[1:4], strict=True))
        eligible = canvas.eligible(query.positions)
        span = verify.leading(canvas, query.positions, eligible)
        stands = self.verdict(canvas, query, readout, then, now, span & verifies[:, None])

        some, drafts = span.any(1), span.any(1) & ~verifies
        wanted, routed = self.route(canvas, readout, span, eligible, self.model.vocab_size, carry.routed)
        routed, waits = where_rows(drafts, routed, carry.routed, canvas.length), wanted & drafts

        share = (self.share(canvas, length) - stands.commit.sum(1)).clamp(min=0)
        rest = self.chosen(sure, score, eligible & ~stands.commit, share) & (share > 0)[:, None]
        commit = (stands.commit | rest) & ~waits[:, None]
        routed = self.learnt(routed, some & ~waits, commit.sum(1) / (1 + verifies.long()))
        ids, confidence = (torch.where(stands.commit, *pair) for pair in zip(stands[1:], (token, sure), strict=True))
        return Edit(ids, commit, confidence=confidence), Round(length, canvas.age + ~waits, waits, now, routed)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps: a draft and a verification for each token."""
        return 2 * tokens
