"""Credit decoding: tokens that were predicted before gain confidence."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number, check_share
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.dinfer import DInferThreshold


@dataclass(frozen=True)
class Credit(DInferThreshold):
    """Credit decoding: tokens that were predicted in earlier steps gain probability, then dInfer's threshold commits.

        credit = 0 for each mask and token
        while masks remain in the block:
            p, token, confidence = model(canvas)
            credit = decay * credit
            credit[token] += confidence ** gamma, at each mask
            p = p * (1 + credit) ** alpha, normalised
            token, confidence = the credited token with the highest p
            best = highest confidence of the masks
            commit the masks with confidence >= min(threshold, best - slack)

    Source: credit decoding, arXiv 2510.06133, as in dInfer. Credit ends with the block, and that of several open blocks
    with the first of them. Under a sliding window it does not end. The published matrix has a number per position and
    token. Here a position remembers its `memory` best-credited tokens, which differs only after more tokens than that
    have been predicted there. Under a temperature the sampled tokens earn credit.

    Args:
        threshold, slack: as in `DInferThreshold`.
        alpha: weight of the credit. 0 leaves confidences as they are.
        gamma: power of the probability a candidate earns.
        decay: factor of the credit per step (beta).
        memory: tokens remembered per position, 1024 at most.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    decay: float = 0.8
    memory: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.alpha", self.alpha, most=64)  # a power of alpha must stay finite
        check_number("scheduler.gamma", self.gamma, most=64)
        check_share("scheduler.decay", self.decay)
        check_count("scheduler.memory", self.memory, most=1024)  # 16 bytes a token and column

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, own_tokens=True)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"probabilities"})

    def init(self, canvas: Canvas) -> Carry:
        """Return tokens and their credit, both `[B, L+1, memory]`. A credit of 0 means that no token is remembered."""
        tokens = torch.zeros(*canvas.ids.shape, self.memory, dtype=torch.long, device=canvas.ids.device)
        return tokens, tokens.double()

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        old = torch.where((canvas.age == 0)[:, None, None], 0, carry[1] * self.decay)
        at = query.positions[..., None].expand(-1, -1, self.memory)  # [B, Q, memory]
        tokens, credit = carry[0].gather(1, at), old.gather(1, at)

        candidate, earned = readout.token[:, 0, :, None], readout.confidence[:, 0, :, None] ** self.gamma
        known = (tokens == candidate) & (credit > 0)
        place = torch.where(known.any(-1), known.int().argmax(-1), credit.argmin(-1))[
            ..., None
        ]  # the weakest gives way
        earns = torch.zeros_like(known).scatter_(-1, place, True) & canvas.eligible(query.positions)[..., None]
        credit = torch.where(earns, torch.where(known, credit, 0) + earned, credit)
        tokens = torch.where(earns, candidate, tokens)

        # Only remembered tokens change, so that the softmax needs no second pass over the vocabulary.
        plain = readout.probabilities[:, 0].gather(-1, tokens).double()
        raised = plain * (1 + credit) ** self.alpha
        total = 1 + (raised - plain).sum(-1)
        best = raised.masked_fill(credit <= 0, -1).argmax(-1, keepdim=True)
        token = tokens.gather(-1, best)[..., 0]
        sure = raised.gather(-1, best)[..., 0] / total
        edit = replace(self.commit(canvas, query, token, sure), confidence=plain.gather(-1, best)[..., 0])
        return edit, (carry[0].scatter(1, at, tokens), old.scatter(1, at, credit))
