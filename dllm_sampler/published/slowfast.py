"""SlowFast's slow phase as in its published code."""

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.slowfast import SlowFast


@dataclass(frozen=True)
class PublishedSlowFast(SlowFast):
    """SlowFast whose slow phase always makes `slow` forwards, even without masks left or after a stable estimate.

    Source: SlowFast Sampling, arXiv 2506.10848. The edge is the first stable estimate.
    """

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        _, _, slow, fast, _ = carry
        return replace(edit, keep_block=(slow > 0) & (fast < 0)), carry  # in the middle of a slow phase

    @override
    def ends(self, slow: Tensor, edge: Tensor) -> Tensor:
        return slow >= self.slow

    def bound(self, tokens: int) -> int:
        """Return the most steps. Each commit may be followed by `slow` forwards that commit nothing."""
        return tokens * (1 + self.slow)
