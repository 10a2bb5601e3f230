"""APD's recompute window: keys and values far enough before the first mask are stored."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, changed
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass
class TrailingCache(BaseCache):
    """APD's recompute window: columns at least `window` before the first mask are reused.

        computes   columns less than `window` before the first mask, and all after
        reuses     all columns before these
        refreshes  nothing

    Source: the recompute window W of APD (adaptive parallel decoding), arXiv 2506.00413. The window ends at the first
    mask of the last forward, so tokens committed since are inside it. Made for left-to-right schedulers. Under another
    order all columns right of the first mask are computed in each forward.

    Args:
        window: number of columns. 1 recomputes each token once after its commit. 0 serves it as the mask that it was.
            On models with a logit shift (Dream) the row that predicts the first mask is always recomputed. Published
            code does not recompute it with 0.
    """

    keeps_noise: ClassVar[bool] = False

    window: int = 16
    edge: Tensor = field(init=False, repr=False, compare=False)  # [B] first noise in the last forward
    stale: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: tokens that the last step changed

    def __post_init__(self) -> None:
        check_count("cache.window", self.window, 0)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.edge, self.stale = canvas.start, torch.zeros_like(canvas.masked)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return canvas.step == 0

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        left = torch.minimum(self.edge - self.window + 1, canvas.frontier() - int(self.spec.shift))  # [B]
        return (canvas.columns() >= left[:, None]) | self.stale | self.due(canvas)[:, None]

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.edge, self.stale = canvas.frontier(), changed(canvas, query, edit)
