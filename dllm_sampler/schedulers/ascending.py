"""ASS: step sizes that double."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.drawn_positions import DrawnPositions


@dataclass(frozen=True)
class AscendingSteps(DrawnPositions):
    """Ascending step size: 1, 2, 4, ... positions per step, so that an answer takes log2 of its length in forwards.

        last = floor(log2(length of the answer)) - 1
        for t = 0, 1, 2, ... while masks remain in the answer:
            token, confidence = model(canvas)
            commit the 2 ** t surest masks of the block, all from t = last on

    Source: ASS, arXiv 2509.23924. Steps count over the whole answer, so later blocks begin with large ones. The
    published blocks are `blocks=ascending`: each such step fills one.
    """

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, scope="answer", scheduled=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        left, total = canvas.noise_left(), canvas.free_before(canvas.end)  # [B]
        last = canvas.step + 1 >= total.double().log2().floor().clamp(min=1)
        count = torch.where(last, left, torch.minimum(left, 2 ** canvas.step.clamp(max=40)))
        order = self.order(canvas, query, readout.confidence[:, 0])
        return Edit(readout.token[:, 0], top(order, canvas.eligible(query.positions), count)), carry
