"""The confidence of AdaBlock's Dream path."""

from dataclasses import dataclass, replace

from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class AmongTop(Around):
    """A scheduler whose confidences are renormalised over the likeliest tokens, as by top-k and top-p.

    Source: AdaBlock's Dream path, arXiv 2509.26432. Its block sizes use plain probabilities, so guides cannot do this.

    Args:
        inner: the scheduler that gets these confidences.
        k: number of tokens at most. None means no limit.
        p: a token counts if the likelier ones together have at most this probability.
    """

    k: int | None = 50
    p: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` that the inner scheduler needs, and probabilities."""
        return super().needs | {"probabilities"}

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        best = readout.probabilities.sort(-1, descending=True).values[..., : self.k]
        if self.p < 1:
            best = best.masked_fill(best.cumsum(-1) - best > self.p, 0)
        confidence = (best[..., 0] / best.sum(-1)).double()  # rounded in float32, as published
        return self.inner.tell(canvas, query, replace(readout, confidence=confidence), carry)
