"""Streaming-dLLM's threshold, which falls as the block fills."""

from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_share
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.spec import Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.core.visibility import visible
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class StreamingThreshold(Threshold):
    """Streaming-dLLM's threshold, which falls as the model sees fewer masks from the block on.

        while masks remain in the block:
            token, confidence = model(canvas)
            r = share of masks among the columns seen from the block's start on
            bound = threshold * (1 - alpha * (1 - r))
            commit the masks with confidence >= bound, or else the surest

    Source: Streaming-dLLM, arXiv 2601.17917. `cache=streaming` keeps few columns after the block. The more there are,
    the less the threshold falls.

    Args:
        threshold: probability if all these columns are masks. If it is above 1, the bound may still fall below 1.
        alpha: share of the threshold that is taken off if none of these columns is a mask.
    """

    alpha: float = 0.3
    behind: bool = field(init=False, default=True)  # the model sees columns after the block

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("scheduler.alpha", self.alpha)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that counts masks after the block."""
        return replace(super().traits, scope="answer")

    def bind(self, context: Context) -> Self:
        """Return a bound copy that knows if the model sees columns after the block."""
        return with_bound_fields(super().bind(context), behind=context.spec.attention == "bidirectional")

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        least = self.falling(canvas, query)[:, None]
        commit = self.chosen_or_one(canvas, query, sure >= least, sure, eligible)
        return Edit(readout.token[:, 0], commit), carry

    def falling(self, canvas: Canvas, query: Query) -> Tensor:
        """Return `[B] float64` the threshold of this step."""
        seen = visible(canvas, query) & (canvas.columns() >= canvas.start[:, None])
        seen = seen if self.behind else canvas.in_block()
        share = (seen & canvas.masked).sum(1).double() / seen.sum(1).clamp(min=1)
        return self.threshold * (1 - self.alpha * (1 - share))
