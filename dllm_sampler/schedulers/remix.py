"""ReMix: a mask's input is mixed with the last prediction at its position."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_number, check_share
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.spec import ModelSpec, SoftInputs, Traits, with_bound_fields
from dllm_sampler.core.statistics import jensen_shannon
from dllm_sampler.core.values import Canvas, Edit, Mixture, Query, Readout
from dllm_sampler.schedulers.wino import wide

TOKENS = 50  # of a mixture at most
LEAST, MOST = 0.2, 0.9  # probability that the tokens of a mixture have together, at most
SHARE, FEW, MANY = 0.7, 5, 20  # a step commits at most this share of the masks, within these numbers


class Predicted(NamedTuple):
    """The predictions of the last forward, at its queried positions."""

    positions: Tensor  # [B, Q]
    law: Tensor  # [B, Q, V] probabilities
    mixture: Mixture  # inputs of the next forward at these positions


@dataclass(frozen=True)
class RejectionMixing(Scheduler):
    """ReMix: each mask that is left is fed a mixture of what was predicted there, unless the prediction jumps.

        while masks remain in the block:
            p, confidence = model(canvas, with mixtures as inputs)
            n = masks with confidence > threshold, at most 70 %, within 5 and 20
            commit the n surest masks, at least one
            rejected = masks left with JS(p, p one forward before) > divergence
            soft = sum of p * E over the likeliest tokens, E[mask] for the rest of p
            mixtures = (1 - share) * E[mask] + share * soft, at masks not rejected

    Source: ReMix (rejection mixing), arXiv 2602.22868, training-free. E is the table of embeddings. The likeliest
    tokens are those that together have at most min(0.9, twice the largest probability), at most 50. The forward that
    opens a block has no mixtures and nothing to compare with. Memory: the last forward's probabilities, as large as the
    block's logits in float32. Deviation: a rejected mask gets mixtures again after one forward, in published code
    never.

    Args:
        threshold: probability a mask must exceed to be committed. The paper has 0.9 for GSM8K, else 0.8.
        divergence: Jensen-Shannon divergence in nats above which a mixture is rejected. From ln 2 on none is.
        share: share of the prediction in a mixture. 0 feeds plain masks.
    """

    threshold: float = 0.9
    divergence: float = 0.3
    share: float = 0.5
    model: ModelSpec | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("scheduler.threshold", self.threshold, "a probability")
        check_number("scheduler.divergence", self.divergence)
        check_share("scheduler.share", self.share)

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the facts about the model."""
        return with_bound_fields(self, model=context.spec)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(scope="model", rare=(SoftInputs(),))

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"probabilities"})

    def init(self, canvas: Canvas) -> Carry:
        """Return predictions at no position, since no forward was made."""
        assert self.model is not None
        nowhere, vocab = torch.full_like(canvas.ids[:, :1], canvas.length), self.model.vocab_size
        precise = torch.promote_types(self.model.dtype, torch.float32)
        law = torch.zeros_like(nowhere, dtype=precise)[..., None].repeat(1, 1, vocab)
        tops = torch.zeros_like(law[..., : min(TOKENS, vocab)], dtype=torch.float32)
        return Predicted(nowhere, law, Mixture(tops.long(), tops, torch.zeros_like(nowhere, dtype=torch.bool)))

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the masks of the block. Those that were predicted in it have mixtures as inputs."""
        return self.mixed(canvas, Query.masks(canvas), carry, canvas.age > 0)

    @staticmethod
    def mixed(canvas: Canvas, query: Query, carry: Predicted, rows: Tensor) -> Query:
        """Return the query with mixtures at the block's masks, in `rows [B] bool`."""
        mixture = carry.mixture.moved(carry.positions, query.positions)
        where = mixture.where & canvas.eligible(query.positions) & rows[:, None]
        return replace(query, mixture=mixture._replace(where=where))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        law, sure, eligible = readout.probabilities[:, 0], readout.confidence[:, 0], canvas.eligible(query.positions)
        commit = select.top(sure, eligible, wide(eligible, sure, self.threshold, SHARE, FEW, MANY))
        at, asked = query.positions.contiguous(), carry.positions.contiguous()
        last = torch.searchsorted(asked, at).clamp(max=asked.shape[1] - 1)  # [B, Q]
        row = last + select.arange(len(asked), last.device)[:, None] * asked.shape[1]
        jump = jensen_shannon(law.flatten(0, 1), carry.law.flatten(0, 1), row.flatten()).view_as(row)
        known = eligible & (asked.gather(1, last) == at) & self.compares(canvas)[:, None]
        rejected = known & (jump > self.divergence)
        return Edit(readout.token[:, 0], commit), self.predicted(at, law, rejected)

    def compares(self, canvas: Canvas) -> Tensor:
        """Return `[B] bool` rows whose last forward was in the same block, so that predictions are compared."""
        return canvas.age > 0

    def predicted(self, positions: Tensor, law: Tensor, rejected: Tensor) -> Predicted:
        """Return the state after predictions `law [B, Q, V]`. Positions `rejected [B, Q]` get no mixture."""
        best, ids = law.topk(min(TOKENS, law.shape[-1]), -1)  # [B, Q, k]
        kept = best.cumsum(-1) <= (2 * best[..., :1]).clamp(LEAST, MOST)
        kept[..., 0] = True
        return Predicted(positions, law, Mixture(ids, (self.share * best * kept).float(), ~rejected))
