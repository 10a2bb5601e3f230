"""Routing policies of S2D2 (arXiv 2603.25702), which decide if a forward verifies a drafted span."""

from dataclasses import dataclass
from math import inf, log
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_positive
from dllm_sampler.core.values import Canvas, Readout
from dllm_sampler.errors import UserError, as_typed

Policy = Literal["mask_span_length", "score_threshold", "score_hysteresis", "contextual_bandit_ucb"]
Estimator = Literal["soft_entropy_negexp", "hard_margin_threshold"]


class Routed(NamedTuple):
    """The state of a policy. It lives as long as the row."""

    on: Tensor  # [B] bool: the last decision of `score_hysteresis` was to verify
    arm: Tensor  # [B] the last choice of `contextual_bandit_ucb`: twice the bucket, plus 1 if it was to verify
    tries: Tensor  # [B, 16] float64: how often each arm was chosen
    rewards: Tensor  # [B, 16] float64: sum of the gains of each arm


@dataclass(frozen=True)
class Routing:
    """A rule that decides from a draft alone whether it is verified.

    The expected gain of a span is the sum of `prod_{j <= k} a_j` over its positions k. Here a_j estimates the
    probability that the draft of position j is accepted. The score is the gain less the cost.

    Args:
        policy: `mask_span_length` verifies spans of at least `min_span` masks. `score_threshold` verifies if the score
            reaches `least`. `score_hysteresis` begins to verify above the score `enter`, and ends below `leave`.
            `contextual_bandit_ucb` verifies if that has gained more tokens per forward in similar rounds (length of the
            span, committed share of the block, mean entropy), by an upper confidence bound.
        min_span: the shortest span that `mask_span_length` verifies, in masks.
        least: bound of `score_threshold`, a score.
        enter, leave: bounds of `score_hysteresis`, scores. `leave` is the lower one.
        cost: number that is subtracted from the expected gain.
        cost_above: probability. The cost counts once for each mask of the block above it, which could be committed
            unverified. With None it counts once per round.
        estimator: formula of a_j. `soft_entropy_negexp` is exp(-`entropy_weight` H / ln V). `hard_margin_threshold` is
            1 if the best probability exceeds the second by more than `margin`, and 0 otherwise.
        entropy_weight: factor of the entropy in `soft_entropy_negexp`.
        margin: difference of probabilities for `hard_margin_threshold`.
        beta: weight of the bandit's confidence term.
    """

    policy: Policy = "mask_span_length"
    min_span: int = 1
    least: float = 0.0
    enter: float = 1.0
    leave: float = -5.0
    cost: float = 1.0
    cost_above: float | None = None
    estimator: Estimator = "soft_entropy_negexp"
    entropy_weight: float = 1.0
    margin: float = 0.05
    beta: float = 1.0

    def check_routing(self) -> None:
        """Refuse settings that are out of range."""
        check_choice("scheduler.policy", self.policy, Policy)
        check_choice("scheduler.estimator", self.estimator, Estimator)
        check_count("scheduler.min_span", self.min_span)
        check_number("scheduler.cost_above", self.cost_above, "a probability", optional=True)
        for name in ("least", "enter", "leave", "cost"):
            check_number(f"scheduler.{name}", getattr(self, name), "a finite score", least=-inf, finite=True)
        if self.policy == "score_hysteresis" and self.leave > self.enter:
            raise UserError(
                "option-range",
                f"scheduler.leave={as_typed(self.leave)} exceeds scheduler.enter={as_typed(self.enter)}. Lower"
                " scheduler.leave, or raise scheduler.enter.",
            )
        check_positive("scheduler.entropy_weight", self.entropy_weight)
        check_number("scheduler.margin", self.margin, "a probability")
        check_number("scheduler.beta", self.beta, finite=True)

    @property
    def routing_needs(self) -> frozenset[str]:
        """Fields of `Readout` that the policy needs."""
        if self.policy == "mask_span_length":
            return frozenset()
        soft = self.policy == "contextual_bandit_ucb" or self.estimator == "soft_entropy_negexp"
        return frozenset({"entropy" if soft else "margin"})

    def unrouted(self, canvas: Canvas) -> Routed:
        """Return the state before the first round."""
        none = torch.zeros(len(canvas.ids), 16, dtype=torch.float64, device=canvas.ids.device)
        return Routed(torch.zeros_like(canvas.done), torch.zeros_like(canvas.start), none, none)

    def route(
        self, canvas: Canvas, readout: Readout, span: Tensor, masks: Tensor, vocab: int, state: Routed
    ) -> tuple[Tensor, Routed]:
        """Return `[B] bool` rows whose draft is to be verified, and the policy's state.

        Args:
            readout: readout of the forward that drafted.
            span: `[B, Q] bool` the positions that would be verified.
            masks: `[B, Q] bool` the masks of the block.
            vocab: number of tokens.
            state: the policy's state after the last round.
        """
        length = span.sum(1)
        if self.policy == "mask_span_length":
            return length >= self.min_span, state
        if self.policy == "contextual_bandit_ucb":
            return self._bandit(canvas, readout, span, vocab, state)
        if self.estimator == "soft_entropy_negexp":
            assert readout.entropy is not None
            odds = torch.exp(-self.entropy_weight * readout.entropy[:, 0] / log(vocab))
        else:
            assert readout.margin is not None
            odds = (readout.margin[:, 0] > self.margin).double()
        gain = _total(odds.masked_fill(~span, 1).cumprod(1), span)
        above = self.cost_above
        sure = 1 if above is None else (masks & (readout.confidence[:, 0] > above)).sum(1)
        score = gain - self.cost * sure
        if self.policy == "score_threshold":
            return score >= self.least, state
        on = torch.where(state.on, score >= self.leave, score > self.enter)
        return on, state._replace(on=on)

    def _bandit(
        self, canvas: Canvas, readout: Readout, span: Tensor, vocab: int, state: Routed
    ) -> tuple[Tensor, Routed]:
        grid = canvas.layout.grid
        assert readout.entropy is not None and grid is not None
        whole, length = grid.part or grid.length, span.sum(1)
        done = canvas.stop - canvas.start - canvas.noise_left()
        mean = _total(readout.entropy[:, 0], span) / (length.clamp(min=1) * log(vocab))
        parts = ((length - 1) / max(whole - 1, 1), done / whole, mean)
        bucket = torch.zeros_like(length)
        for part in parts:
            bucket = 2 * bucket + (2 * part).long().clamp(0, 1)
        both = torch.stack([2 * bucket, 2 * bucket + 1], 1)  # [B, 2]
        tries, made = state.tries.gather(1, both), 1 + state.tries.sum(1, keepdim=True)  # this decision included
        bound = state.rewards.gather(1, both) / tries + self.beta * (made.log() / tries).sqrt()
        plain, verified = bound.masked_fill(tries == 0, inf).unbind(1)
        verifies = verified >= plain
        return verifies, state._replace(arm=2 * bucket + verifies)

    def learnt(self, state: Routed, over: Tensor, gained: Tensor) -> Routed:
        """Return the state after a round has ended in the rows `over [B] bool`.

        It committed `gained [B]` tokens per forward.
        """
        if self.policy != "contextual_bandit_ucb":
            return state
        at = state.arm[:, None]
        tries = state.tries.scatter_add(1, at, over[:, None].double())
        return state._replace(tries=tries, rewards=state.rewards.scatter_add(1, at, (gained * over)[:, None].double()))


def _total(values: Tensor, where: Tensor) -> Tensor:
    """Return `[B]` the sum of `values [B, Q]` at `where`. On the CPU later zeros change no bit: it adds in order."""
    return values.masked_fill(~where, 0).cumsum(1)[:, -1]
