"""A temperature that falls while a block is decoded."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.statistics import tempered
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class LinearTemperature(Guide):
    """A temperature t = low + (high - low) (steps - age) / steps that tokens are drawn and confidence is measured with.

    Args:
        low: temperature from the block's forward number `steps` on, counted from 0.
        high: temperature of the forward that opens a block (age 0).
        steps: forwards planned for a block.
    """

    keeps_excluded: ClassVar[bool] = True

    low: float
    high: float
    steps: int

    @property
    @override
    def measures(self) -> bool:
        return True

    @property
    @override
    def draws(self) -> bool:
        return True

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        precise = torch.promote_types(logits.dtype, torch.float32)
        left = (self.steps - canvas.age.to(precise)).clamp(min=0) / self.steps  # [B]
        return tempered(logits, (self.low + (self.high - self.low) * left)[head_rows.row, None])
