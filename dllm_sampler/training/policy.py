"""Figures that tell whether a policy stays healthy: how varied its answers are, and whether it learns what it did."""

from __future__ import annotations

from torch import Tensor

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.naming import named
from dllm_sampler.result import Result, Trace
from dllm_sampler.sampler import Sampler

ROUNDING = {"no": 1e-3, "bf16": 5e-2}  # mean distance of log-probabilities that is not worth a sentence


def distinct(result: Result, group: int) -> float:
    """Mean over groups of `group` consecutive answers: share of them that differ, up to and with the end token."""
    rows = [tuple(row[:n]) for row, n in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]
    groups = [rows[first : first + group] for first in range(0, len(rows), group)]
    return sum(len(set(some)) / len(some) for some in groups) / len(groups)


def entropy(trace: Trace, end_ids: tuple[int, ...]) -> float:
    """Mean over the tokens up to the first end token of each answer: nats of the prediction that it was drawn from.

    trace: with a recorded entropy.
    """
    assert trace.entropy is not None
    there = (trace.step_map >= 0) & (trace.gone < 0)
    ends = is_end(trace.ids, end_ids) & there
    there &= ends.cumsum(1) - ends.long() == 0
    return float(trace.entropy[there].double().mean()) if there.any() else 0.0


def mismatch(sampled: Tensor, learner: Tensor, there: Tensor) -> dict[str, float]:
    """Importance ratios of tokens, learner over sampler, before anything is learned from them.

    Args:
        sampled: `[B, L]` log-probabilities that were recorded.
        learner: `[B, L]` the same under the weights and settings of learning.
        there: `[B, L]` bool, tokens that count.

    Returns:
        `ratio`, `ratio_least`, `ratio_most`: mean and ends of the ratios; `ratio_log`: mean distance of the
        log-probabilities; `ratio_kl`: the mean of r - 1 - log r, an estimate of KL(sampler || learner).
        Nothing where no token counts.
    """
    away = (learner.double() - sampled.double())[there]
    if not len(away):
        return {}
    ratio = away.exp()
    return {
        "ratio": float(ratio.mean()),
        "ratio_least": float(ratio.min()),
        "ratio_most": float(ratio.max()),
        "ratio_log": float(away.abs().mean()),
        "ratio_kl": float((ratio - 1 - away).mean()),
    }


def sentence(found: dict[str, float], rollouts: Sampler, precision: str) -> str | None:
    """What to tell the user of a mismatch; None: it is rounding."""
    if found["ratio_log"] <= ROUNDING[precision]:
        return None
    return (
        f"the policy that samples is not the one that learns (train.rollout.cache={named(rollouts.plugins.cache)}):"
        f" importance ratio of a token {found['ratio']:.3g} ({found['ratio_least']:.3g} to {found['ratio_most']:.3g}),"
        f" divergence {found['ratio_kl']:.2g} nats; an exact cache has none"
    )
