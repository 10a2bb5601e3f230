"""The confidence of AdaBlock's Dream path."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class AmongTop(Around):
    """Confidence is the share of the likeliest tokens' mass: of those that reach `p` together, at most `k`.

    Source: AdaBlock's Dream path, arXiv 2509.26432. Guides would show it to the blocks too, which it sizes by plain
    probabilities.
    """

    k: int | None = 50
    p: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Probabilities too."""
        return super().needs | {"probabilities"}

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.probabilities is not None
        best = readout.probabilities.sort(-1, descending=True).values[..., : self.k]
        if self.p < 1:
            best = best.masked_fill(best.cumsum(-1) - best > self.p, 0)
        confidence = (best[..., 0] / best.sum(-1)).double()  # float32, as published: what rounds to 1 is 1
        return self.inner.tell(canvas, query, replace(readout, confidence=confidence), carry)
