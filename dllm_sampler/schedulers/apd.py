"""APD: a small autoregressive model decides how much of a left-to-right draft is committed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_share
from dllm_sampler.core.protocols import Carry, Context, Guide
from dllm_sampler.core.spec import BatchState, LeftToRightVerifier, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.models.mixture import mixture
from dllm_sampler.schedulers.leftright import Leftmost

if TYPE_CHECKING:
    from dllm_sampler.models.autoregressive import Verifier


@dataclass(frozen=True)
class ParallelDecoding(Leftmost):
    """Adaptive parallel decoding: the part of a left-to-right draft that a small autoregressive model confirms.

        while masks remain in the block:
            draft = model(canvas) at the first max_lookahead masks
            law = verifier(text with the draft), at each of them
            target = draw(model ** mixture_weight * law ** (1 - mixture_weight))
            commit the first token of the draft, and each one after it
                until one differs from its target

    Source: APD, arXiv 2506.00413. Targets are drawn by the same guides (temperature, top-p) and the same noise as the
    draft. The token that differs is drafted again with more context. The text follows neither model's law exactly. It
    is published with `blocks=full` and its window W as `cache=trailing`. The verifier's passes do not count as NFE.

    Args:
        max_lookahead: M, columns from the first mask on that the model sees and drafts. With None all.
        verifier: a causal LM of transformers with the model's tokenizer: a folder, a hub id or a live model.
        mixture_weight: R, the model's own share. 1 accepts every draft. 0 accepts what the verifier draws too, and the
            first token.
    """

    max_lookahead: int | None = 100
    verifier: Any = None
    mixture_weight: float = 0.7
    loaded: Verifier | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("scheduler.mixture_weight", self.mixture_weight, "a number")

    def bind(self, context: Context) -> Self:
        """Return a copy with the verifier, which is loaded once for a model.

        Raises:
            UserError: no verifier is given or can be loaded, or its vocabulary or tokenizer is not the model's.
        """
        from dllm_sampler.models import autoregressive  # transformers' modelling code takes seconds to import

        loaded = self.loaded
        if loaded is None or loaded.spec != context.spec:
            loaded = autoregressive.fit(self.verifier, context.spec)
        if context.tokenizer is not None:
            loaded.check_tokenizer(context.tokenizer)
        return with_bound_fields(self, loaded=loaded)

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """Return guides that exclude tokens unknown to the verifier, followed by the guides `given`."""
        assert self.loaded is not None
        return (*self.loaded.guides, *given)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"draw"})

    @property
    def traits(self) -> Traits:
        """Traits of a rule with a verifier that has its own cache and reads from left to right."""
        facts = replace(super().traits, graph_safe=False, own_tokens=True, scope="model")
        return facts.adding(BatchState(), LeftToRightVerifier())

    def init(self, canvas: Canvas) -> Carry:
        """Return the state of a verifier that has not read any text."""
        assert self.loaded is not None
        return self.loaded.begin(canvas)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.draw is not None
        at, ids = query.positions, readout.token[:, 0]  # [B, Q]
        first, width = canvas.frontier(), min(at.shape[1], self.max_lookahead or canvas.length)
        draft = self.draft(canvas, query) & (at < first[:, None] + width)
        text = canvas.ids.scatter(1, at, torch.where(draft, ids, canvas.ids.gather(1, at)))
        expected = carry.logits_at(at, canvas, text, first, width)  # [B, Q, V]
        mixed = mixture(readout.draw.logits[:, 0], expected, self.mixture_weight)[:, None]  # [B, 1, Q, V]
        agrees = ids == self.target(readout, mixed)[:, 0]
        leads = draft & (draft.cumsum(1) == 1)
        commit = draft & ((draft & ~(agrees | leads)).cumsum(1) == 0)
        return Edit(ids, commit), carry

    def target(self, readout: Readout, mixed: Tensor) -> Tensor:
        """Return `[B, 1, Q]` tokens drawn from the logits `mixed [B, 1, Q, V]` as the draft was from its own."""
        assert readout.draw is not None
        return readout.draw(mixed)
