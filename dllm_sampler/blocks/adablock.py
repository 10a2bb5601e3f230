"""AdaBlock: blocks that end at a delimiter, for example at the end of a line."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number, check_share, checked_tokens
from dllm_sampler.core.protocols import Blocks
from dllm_sampler.core.values import Canvas, Query, Readout


@dataclass(frozen=True)
class AdaBlock(Blocks):
    """Blocks that end with the most confident delimiter (for example a newline), if it reaches a threshold.

    Source: AdaBlock-dLLM, arXiv 2509.26432. The forward that opens a block also sizes it. Its candidates are the
    positions of a window whose predicted token is a delimiter. The most confident one is the last position of the
    block, if its confidence reaches the threshold. Otherwise the block has `length` positions. As in the published
    code, the window is a share of the whole answer. In the paper it grows with the number of decoded tokens.

    Args:
        delimiters: token ids. Without any, every block has `length` positions.
        threshold: probability that the delimiter must reach. Above 1, every block has `length` positions.
        length: positions of a block without a delimiter. It may exceed the window.
        window: positions from the block's start in which a delimiter counts, as a share of the answer.
    """

    sizes_on_open: ClassVar[bool] = True
    judges_draws: ClassVar[bool] = True

    delimiters: tuple[int, ...] = (198,)
    threshold: float = 0.3
    length: int = 32
    window: float = 0.25

    def __post_init__(self) -> None:
        vars(self)["delimiters"] = checked_tokens("blocks.delimiters", self.delimiters)
        check_count("blocks.length", self.length)
        check_number("blocks.threshold", self.threshold)
        check_share("blocks.window", self.window)

    @override
    def lookahead(self, tokens: int) -> int:
        return min(max(self.length, int(self.window * tokens)), tokens)

    @override
    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        ahead = query.positions - canvas.start[:, None]  # [B, Q]
        delimits = torch.zeros_like(ahead, dtype=torch.bool)
        for mark in self.delimiters:  # numbers, not a tensor: that would be a copy to the device in every step
            delimits |= readout.token[:, 0] == mark
        inside = canvas.eligible(query.positions) & (
            ahead < (self.window * canvas.layout.new_tokens.double()).long()[:, None]
        )
        sure, surest = readout.confidence[:, 0].masked_fill(~(delimits & inside), -1.0).max(1)  # first on a tie
        found = canvas.start + ahead.gather(1, surest[:, None])[:, 0] + 1
        fallback = torch.minimum(canvas.start + self.length, canvas.end)
        return torch.where((sure >= self.threshold) & (sure >= 0), found, fallback)
