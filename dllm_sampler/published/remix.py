"""ReMix as in its published code."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.schedulers.remix import Predicted, RejectionMixing


@dataclass(frozen=True)
class PublishedRejectionMixing(RejectionMixing):
    """ReMix whose rejected positions are plain masks until they are committed: their stored prediction is zero.

    The generation's second forward has no mixtures. A block's first forward is compared with the last one of the block
    before.

    Source: the code of ReMix, arXiv 2602.22868.
    """

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Query the whole answer, since the next block compares its predictions with these."""
        return self.mixed(canvas, Query.at(canvas, canvas.answer()), carry, (canvas.age > 0) & (canvas.step > 1))

    @override
    def compares(self, canvas: Canvas) -> Tensor:
        return canvas.step > 0

    @override
    def predicted(self, positions: Tensor, law: Tensor, rejected: Tensor) -> Predicted:
        return super().predicted(positions, law.masked_fill(rejected[..., None], 0), rejected)
