"""A block-causal model at block size 1 verifies a draft, by speculative sampling (arXiv 2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_positive
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import ModelSpec, with_bound_fields
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError
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


@dataclass(frozen=True)
class Verifying(DynamicThreshold):
    """The base of schedulers whose drafts are verified by the same model.

    Args:
        tempering: exponent of the ratio of probabilities by which a drafted token is accepted.
    """

    tempering: float = 1.0
    position_temperature: float = field(init=False, default=0.0)  # a draft is made to be verified
    model: ModelSpec | None = field(init=False, default=None, repr=False, compare=False)
    draws: bool = field(init=False, default=True)  # whether tokens are drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scheduler.tempering", self.tempering)

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the model's facts. Refuses a model that cannot have block size 1."""
        spec = context.spec
        if spec.attention != "block_causal" or spec.shift:
            what = "has a logit shift" if spec.attention == "block_causal" else "is not block-causal"
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} verifies drafts by a block-causal model at block size 1 (SDAR, LLaDA2), and"
                f" this model {what}. Use scheduler=ssd or scheduler=freedave.",
            )
        return with_bound_fields(super().bind(context), model=spec, draws=context.draws)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout`, with the step's choice if tokens are drawn."""
        return super().needs | ({"draw"} if self.draws else set())

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
        """Return a query that verifies the draft in `rows [B] bool`. In the other rows it asks the same as `query`."""
        fills = rows[:, None] & canvas.eligible(query.positions)
        token = draft._replace(law=None).at(query.positions).token
        ids = torch.where(fills, token, query.ids[:, 0])[:, None]
        return replace(query, ids=ids, leave_one_out=True, causal=rows)

    def verdict(
        self, canvas: Canvas, query: Query, readout: Readout, draft: Draft, now: Draft, span: Tensor
    ) -> Verdict:
        """Return the commits of a draft: accepted tokens from the left, and another token for the first that fails.

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


def leading(canvas: Canvas, positions: Tensor, eligible: Tensor) -> Tensor:
    """Return `[B, Q] bool` the first run of consecutive columns among the `eligible [B, Q]` of `positions [B, Q]`."""
    first = positions.masked_fill(~eligible, canvas.length).amin(1, keepdim=True)
    return eligible & (positions - first == eligible.cumsum(1) - 1)


def upto_failure(span: Tensor, stands: Tensor) -> Tensor:
    """Return `[B, Q] bool` the positions of `span` up to the first one that does not stand, which is included."""
    fails = (span & ~stands).long()
    return span & (fails.cumsum(1) == fails)
