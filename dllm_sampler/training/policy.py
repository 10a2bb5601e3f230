"""The clipped policy-gradient loss of GRPO (arXiv 2402.03300) over any chunks of tokens, and a policy's figures."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.result import Result
from dllm_sampler.training.masked import Chunk


@dataclass(frozen=True)
class Goal:
    """The constants of an update's loss."""

    advantage: Tensor  # [N]
    weight: Tensor  # [N, L] sums to 1
    old: Tensor | None  # [N, L] log-probability under the policy that sampled. None stands for the present policy
    reference: Tensor | None  # [N, L] log-probability under the reference

    def loss(self, chunk: Chunk, logprob: Tensor, epsilon: float, beta: float) -> tuple[Tensor, Mapping[str, float]]:
        """Return the chunk's share of the loss, and of the figures `clipped` and `kl`.

        A token's loss is -min(r A, clip(r) A) with its ratio r to the policy that sampled, clipped to 1 - epsilon and
        1 + epsilon, plus `beta` times exp(d) - d - 1 with d = log pi_ref - log pi, an estimate of the divergence.
        """

        def at(values: Tensor) -> Tensor:
            found = values[chunk.row[:, None], chunk.columns]
            return torch.where(chunk.there, found, 0).to(logprob)

        weight, advantage = at(self.weight), self.advantage[chunk.row][:, None].to(logprob)
        ratio = (logprob - (logprob.detach() if self.old is None else at(self.old))).exp()
        bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
        each = -torch.minimum(ratio * advantage, bounded * advantage)
        figures = {"clipped": float((weight * (bounded * advantage < ratio * advantage)).sum())}
        if self.reference is not None:
            away = at(self.reference) - logprob
            divergence = away.exp() - away - 1
            figures["kl"] = float((weight * divergence.detach()).sum())
            each = each + beta * divergence
        return (weight * each).sum(), figures


def advantages(scores: Tensor, group: int, scale: bool) -> Tensor:
    """Return `[N]` each score minus the mean of its group (`group` consecutive ones); 0 for samples without a score.

    scale: divide by the group's deviation (plus 1e-4), as GRPO does and CJ-GRPO does not
    """
    groups = scores.view(-1, group)
    there = ~groups.isnan()
    count = there.sum(1, keepdim=True).clamp(min=1)
    mean = groups.nan_to_num(0).sum(1, keepdim=True) / count
    centred = torch.where(there, groups - mean, 0)
    # A mean of equal numbers may be off by its rounding, and dividing by the deviation would blow that up.
    same = (centred.abs() <= 1e-12 * (1 + mean.abs())).all(1, keepdim=True)
    centred = torch.where(same, 0, centred)
    if scale:
        centred = centred / ((centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt() + 1e-4)
    return centred.flatten()


def distinct(result: Result, group: int) -> float:
    """Return the share of different answers in a group of `group`, mean over the groups."""
    rows = [tuple(row[:n]) for row, n in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]
    groups = [rows[first : first + group] for first in range(0, len(rows), group)]
    return sum(len(set(some)) / len(some) for some in groups) / len(groups)


def mismatch(sampled: Tensor, learner: Tensor, there: Tensor) -> dict[str, float]:
    """Return figures of the tokens' importance ratios r, learner over sampler. Empty if no token is `there`.

    `ratio_kl` is the mean of r - 1 - log r, an estimate of KL(sampler || learner).
    """
    away = (learner.double() - sampled.double())[there]
    if not len(away):
        return {}
    ratio = away.exp()
    found = {"ratio": ratio.mean(), "ratio_least": ratio.min(), "ratio_most": ratio.max()}
    found |= {"ratio_log": away.abs().mean(), "ratio_kl": (ratio - 1 - away).mean()}
    return {name: float(value) for name, value in found.items()}
