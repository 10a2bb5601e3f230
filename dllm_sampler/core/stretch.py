"""What lies between the decided beginning of an answer and its end that nothing is asked about.

A choice of tokens that belong together (`Guide.joint`) goes through these places one after the other. Before them one
way is left, and behind them all ways are open, whatever the step finds out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.values import Canvas


def stretch(canvas: Canvas, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`[B]` where it begins and `[B]` where it ends in each answer, counted from the answer's first place.

    Args:
        positions: `[B, Q]` columns that are asked about.
    """
    answer = canvas.answer()  # [B, N]
    asked = torch.zeros_like(canvas.masked).scatter(1, positions, torch.ones_like(positions, dtype=torch.bool))
    asked, free = asked.gather(1, answer), canvas.masked.gather(1, answer)
    there, place = answer < canvas.end[:, None], select.numbers(answer.shape[1], answer.device)
    end = torch.where(there & (asked | ~free), place + 1, 0).amax(1)
    begin = torch.where(there & (asked | free), place, answer.shape[1]).amin(1)
    return torch.minimum(begin, end), end
