"""S2D2: a block-diffusion model at block size 1 verifies what it drafted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_positive
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.spec import LeftToRightVerifier, ModelSpec, ShadowRows, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.drafting.routing import Routed, Routing
from dllm_sampler.schedulers.dynamic import DynamicThreshold
from dllm_sampler.schedulers.score import rate

TINY = 1e-12  # lower bound on the probability of a drafted token


class Draft(NamedTuple):
    """The predictions of a forward."""

    positions: Tensor  # [B, Q] sorted
    token: Tensor  # [B, Q]
    confidence: Tensor  # [B, Q] float64
    score: Tensor  # [B, Q] statistic that ranks the masks
    law: Tensor | None  # [B, Q, V] the law that tokens are drawn from. None takes the best ones

    def at(self, positions: Tensor) -> Draft:
        """Return the predictions at `positions [B, Q]`. They are void where nothing was predicted."""
        place = torch.searchsorted(self.positions, positions.contiguous()).clamp(max=self.positions.shape[1] - 1)
        token, confidence, score = (one.gather(1, place) for one in (self.token, self.confidence, self.score))
        law = self.law
        if law is not None:
            law = law.gather(1, place[..., None].expand(-1, -1, law.shape[-1]))
        return Draft(positions, token, confidence, score, law)


class Verdict(NamedTuple):
    """The commits of a verification."""

    commit: Tensor  # [B, Q] bool
    token: Tensor  # [B, Q]
    confidence: Tensor  # [B, Q] float64 probability of the token by the verifier


class Round(NamedTuple):
    """The state of a row between two forwards: its draft, and its progress in the block."""

    length: Tensor  # [B] positions of the block when it was opened
    made: Tensor  # [B] rounds made in this block
    waits: Tensor  # [B] bool: the draft waits for the forward that verifies it
    draft: Draft
    routed: Routed


@dataclass(frozen=True)
class SelfVerified(Routing, DynamicThreshold):
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
        tempering: exponent of the ratio of probabilities by which a drafted token is accepted.
        policy, min_span, least, enter, leave, cost, cost_above, estimator, entropy_weight, margin, beta: see
            `Routing`.
    """

    tempering: float = 1.0
    position_temperature: float = field(init=False, default=0.0)  # a draft is made to be verified
    model: ModelSpec | None = field(init=False, default=None, repr=False, compare=False)
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scheduler.tempering", self.tempering)
        self.check_routing()

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the model's facts. Refuses a model that cannot have block size 1."""
        spec = context.spec
        if spec.attention != "block_causal" or spec.shift:
            what = "has a logit shift" if spec.attention == "block_causal" else "is not block-causal"
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} needs a block-causal model without a logit shift (SDAR, LLaDA2), and this"
                f" model {what}. Use scheduler={drafting_for(spec)}.",
            )
        return with_bound_fields(super().bind(context), model=spec, draws=context.draws)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that queries drafts, by shadow rows, and commits them a forward later."""
        facts = replace(super().traits, asks_block=False, needs_every_position=True, drafts=True, own_tokens=True)
        return replace(facts, scope="model").adding(ShadowRows(), LeftToRightVerifier())

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | self.routing_needs | ({"draw"} if self.draws else set())

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
        span = leading(canvas, query.positions, eligible)
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

    def undrafted(self, canvas: Canvas) -> Draft:
        """Return predictions at no position, for the carry before the first forward."""
        assert self.model is not None
        nowhere = torch.full_like(canvas.ids[:, :1], canvas.length)
        zero, dtype = torch.zeros_like(nowhere), torch.promote_types(self.model.dtype, torch.float32)
        law = zero[..., None].to(dtype).repeat(1, 1, self.model.vocab_size) if self.draws else None
        return Draft(nowhere, zero, zero.double(), zero.double(), law)

    def drafted(self, canvas: Canvas, query: Query, readout: Readout) -> Draft:
        """Return the predictions of a forward, to be verified or to verify with."""
        law = None
        if self.draws:
            assert readout.draw is not None
            law = readout.draw.law(readout.draw.logits)[:, 0]
        score = rate(self.score, canvas, query, readout)
        return Draft(query.positions.contiguous(), readout.token[:, 0], readout.confidence[:, 0], score, law)

    def verifying(self, canvas: Canvas, query: Query, draft: Draft, rows: Tensor) -> Query:
        """Return a query that verifies the draft in `rows [B] bool`. In the other rows it is the same as `query`."""
        fills = rows[:, None] & canvas.eligible(query.positions)
        token = draft._replace(law=None).at(query.positions).token
        ids = torch.where(fills, token, query.ids[:, 0])[:, None]
        return replace(query, ids=ids, leave_one_out=True, causal=rows)

    def verdict(
        self, canvas: Canvas, query: Query, readout: Readout, draft: Draft, now: Draft, span: Tensor
    ) -> Verdict:
        """Return the commits of a draft by speculative sampling (arXiv 2211.17192).

        These are accepted tokens from the left, and another token for the first that fails.

        Args:
            now: predictions of the verifying forward.
            span: `[B, Q] bool` positions that were verified.
        """
        if draft.law is None or now.law is None:
            return Verdict(upto_failure(span, draft.token == now.token), now.token, now.confidence)
        mine, its = (law.gather(-1, draft.token[..., None])[..., 0] for law in (now.law, draft.law))
        odds = ((mine / its.clamp(min=TINY)) ** self.tempering).clamp(max=1)
        stands = self.uniform(canvas, query.positions.masked_fill(~span, canvas.length)) < odds
        commit = upto_failure(span, stands)
        rest = (now.law - draft.law).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, now.law)
        token = torch.where(stands, draft.token, self.redrawn(readout, rest, commit & ~stands))
        return Verdict(commit, token, now.law.gather(-1, token[..., None])[..., 0].double())

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """Return `[B, Q]` uniform numbers for `positions [B, Q]`. Numbers at the empty slot are not used."""
        return canvas.uniform(positions)

    def redrawn(self, readout: Readout, weight: Tensor, failed: Tensor) -> Tensor:
        """Return `[B, Q]` tokens drawn in proportion to `weight [B, Q, V]`. Those at `failed [B, Q]` are used."""
        assert readout.draw is not None
        return readout.draw.drawn(weight[:, None])[:, 0]


def drafting_for(spec: ModelSpec) -> str:
    """Return the name of a drafting scheduler that supports a model, or `block_refine` if it has no mask token."""
    if spec.mask_id is None:
        return "block_refine"
    if spec.attention == "causal_context":
        return "linear_spec"
    return "s2d2" if spec.attention == "block_causal" and not spec.shift else "freedave"


def leading(canvas: Canvas, positions: Tensor, eligible: Tensor) -> Tensor:
    """Return `[B, Q] bool` the first run of consecutive columns among the `eligible [B, Q]` of `positions [B, Q]`."""
    first = positions.masked_fill(~eligible, canvas.length).amin(1, keepdim=True)
    return eligible & (positions - first == eligible.cumsum(1) - 1)


def upto_failure(span: Tensor, stands: Tensor) -> Tensor:
    """Return `[B, Q] bool` the positions of `span` up to the first one that does not stand, which is included."""
    fails = (span & ~stands).long()
    return span & (fails.cumsum(1) == fails)
