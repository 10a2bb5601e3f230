"""APD: a small autoregressive model says how much of a left-to-right draft is taken."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.checks import check_share
from dllm_sampler.core.packing import Answers
from dllm_sampler.core.protocols import Carry, Context, Guide
from dllm_sampler.core.spec import ModelSpec, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.leftright import Leftmost

if TYPE_CHECKING:
    from dllm_sampler.speculative.autoregressive import Verifier


@dataclass(frozen=True)
class _Known(Guide):
    """Only tokens below `size` may be chosen."""

    excludes: ClassVar[bool] = True

    size: int

    def __call__(self, logits: Tensor, canvas: Canvas, answers: Answers) -> Tensor:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= self.size
        return logits.masked_fill(beyond, -torch.inf)


@dataclass(frozen=True)
class ParallelDecoding(Leftmost):
    """Commit the longest run of the left-to-right draft that a mixture with a small autoregressive model draws too.

    Source: APD (adaptive parallel decoding), arXiv 2506.00413. The forward drafts every mask in sight by itself; one
    pass of the verifier over the draft gives each position's distribution after the drafted tokens before it. The
    target at a position is drawn from the product `p_model^R p_verifier^(1-R)` by the same guides (temperature, top-p)
    and the same noise as the draft. The first draft always counts, then those that equal their targets, up to the
    first that does not: nothing is corrected, it is drafted again with more context. So at least one of the model's
    own tokens is committed per forward, and the text is neither model's exactly. Published with `blocks=full`, the
    recompute window W is `cache=trailing`. The verifier makes one pass per forward, which is no part of NFE.

    Args:
        max_lookahead: M, columns from the first mask on that the model sees, drafts included; a smaller one shows it a
            shorter answer. None: all.
        verifier: a causal LM of transformers with the model's tokenizer: a folder, a hub id or a live model.
        mixture_weight: R, the model's own share; 1 takes every draft, 0 only what the verifier draws.
    """

    max_lookahead: int | None = 100
    verifier: Any = None
    mixture_weight: float = 0.7
    judge: Verifier | None = field(init=False, default=None, repr=False, compare=False)
    model: ModelSpec | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("scheduler.mixture_weight", self.mixture_weight, "a number")

    def bind(self, context: Context) -> Self:
        """Load the verifier, once for a model.

        Raises:
            UserError: none given, nothing to load, or another vocabulary or tokenizer than the model's.
        """
        from dllm_sampler.speculative import autoregressive  # transformers' modelling code takes seconds to import

        bound = self
        if self.judge is None or self.model != context.spec:
            bound = replace(self)
            object.__setattr__(bound, "judge", autoregressive.fit(self.verifier, context.spec))
            object.__setattr__(bound, "model", context.spec)
        if context.tokenizer is not None:
            assert bound.judge is not None
            bound.judge.check_tokenizer(context.tokenizer)
        return bound

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """Only tokens that the verifier knows."""
        assert self.judge is not None and self.model is not None
        known = (_Known(self.judge.vocab_size),) if self.judge.vocab_size < self.model.vocab_size else ()
        return (*known, *given)

    @property
    def needs(self) -> frozenset[str]:
        """Logits before the guides, and the draw that chose the draft."""
        return frozenset({"raw", "draw"})

    @property
    def traits(self) -> Traits:
        """The verifier keeps what it read in a cache of its own."""
        return replace(super().traits, static=False)

    def init(self, canvas: Canvas) -> Carry:
        """What the verifier has read: nothing."""
        assert self.judge is not None
        return self.judge.begin(canvas)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        assert readout.raw is not None
        at, ids = query.positions, readout.token[:, 0]
        first, width = canvas.frontier(), min(at.shape[1], self.max_lookahead or canvas.length)
        place = at - first[:, None]  # [B, Q]
        draft = self.draft(canvas, query) & (place < width)
        text = canvas.ids.scatter(1, at, torch.where(draft, ids, canvas.ids.gather(1, at)))
        expected = carry.logits(canvas, text, first, width)  # [B, S, V]
        expected = expected.gather(1, place.clamp(0, width - 1)[..., None].expand(-1, -1, expected.shape[-1]))
        mixed = mixture(readout.raw[:, 0], expected, self.mixture_weight)[:, None]  # [B, 1, Q, V]
        agrees = ids == self.target(readout, mixed)[:, 0]
        leads = draft & (draft.cumsum(1) == 1)
        commit = draft & ((draft & ~(agrees | leads)).cumsum(1) == 0)
        return Edit(ids, commit, forced=leads & ~agrees), carry

    def target(self, readout: Readout, mixed: Tensor) -> Tensor:
        """`[B, 1, Q]` tokens drawn from the logits `mixed [B, 1, Q, V]` as the draft was from its own."""
        assert readout.draw is not None
        return readout.draw(mixed)


def mixture(own: Tensor, other: Tensor, weight: float) -> Tensor:
    """Logits `[..., V]` of the product of two distributions, the first to the power `weight`, the second to the rest.

    Args:
        own: `[..., V]` logits; whatever is impossible here, or unknown to the other, stays so.
        other: `[..., V']` logits of the tokens that both know, more, or fewer.
    """
    precise = torch.promote_types(own.dtype, torch.float32)
    other = pad(other.to(precise), (0, own.shape[-1] - other.shape[-1]), value=-torch.inf)
    mixed = weight * own.to(precise) + (1 - weight) * other
    impossible = (own == -torch.inf) | (other == -torch.inf)  # 0 times infinity is no number
    return mixed.masked_fill(impossible, -torch.inf).to(own.dtype)
