"""Learn2PD's End-of-Text prediction."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_number
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.stops.end_tokens import TruncateStop

Mode = Literal["resolved", "predicted"]


@dataclass(frozen=True)
class EndOfText(TruncateStop):
    """A cut of the canvas after the end of text: a committed end-of-text token, or a predicted one.

    Source: End-of-Text prediction of Learn2PD, arXiv 2509.25188. `resolved` is the paper's rule. It cuts after a
    committed end-of-text token, as `TruncateStop` does. `predicted` is the published code's rule. In a step that
    commits no end-of-text token, it also cuts after the mask with the most confident predicted one, anywhere on the
    canvas. The code requires no confidence (`min_conf=0`), and can cut after the first forward.

    Args:
        mode: `resolved` or `predicted`.
        min_conf: probability that a predicted end-of-text token must reach, for `predicted`. Above 1, none does.
    """

    mode: Mode = "resolved"
    min_conf: float = 0.9

    def __post_init__(self) -> None:
        check_choice("stop.mode", self.mode, Mode)
        check_number("stop.min_conf", self.min_conf)

    @override
    def positions(self, canvas: Canvas) -> Tensor | None:
        return canvas.masked if self.mode == "predicted" else None

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        watched = self.positions(after)
        if watched is None:
            return super().__call__(canvas, after, query, readout, edit)
        at, nowhere = query.positions, canvas.length + 1  # [B, Q]
        wrote = edit.commit & is_end(edit.ids, self.end_ids) & (at < canvas.length)
        cut = torch.where(wrote, at + 1, nowhere).amin(1)
        ends = is_end(readout.token[:, 0], self.end_ids)
        likely = watched.gather(1, at) & ends & (readout.confidence[:, 0] >= self.min_conf)
        sure, surest = readout.confidence[:, 0].masked_fill(~likely, -1.0).max(1)  # first on a tie
        guess = torch.where(sure >= 0, at.gather(1, surest[:, None])[:, 0] + 1, nowhere)
        cut = torch.where(cut < nowhere, cut, guess)
        return replace(edit, end=cut if edit.end is None else torch.minimum(cut, edit.end))
