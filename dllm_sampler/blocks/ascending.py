"""ASS: blocks as long as the steps of `scheduler=ascending`."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Blocks
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError, counted


@dataclass(frozen=True)
class AscendingBlocks(Blocks):
    """ASS's blocks: each block after the first is as long as one step of `scheduler=ascending`.

    Source: ASS, arXiv 2509.23924. For G tokens let S = floor(log2 G). The last block has 2^(S-1) + 1 + (G - 2^S)
    positions, and those before it have 2^(S-2), 2^(S-3) and so on. The first block has the remaining positions.

    Args:
        count: number of blocks, at most S (1 if S is 0).
    """

    sizes_on_open: ClassVar[bool] = True

    count: int = 4

    def __post_init__(self) -> None:
        check_count("blocks.count", self.count)

    def ends(self, tokens: int) -> list[int]:
        """Return the ends of the blocks of an answer of `tokens` columns, counted from its first one."""
        steps = tokens.bit_length() - 1
        if self.count > max(steps, 1):
            raise UserError(
                "option-range",
                f"blocks.count={self.count} is too large for {counted(tokens, 'new token')}. Set"
                f" at most {max(steps, 1)}.",
            )
        later = [2 ** (steps - 1) + 1 + tokens - 2**steps, *(2 ** (steps - 2 - i) for i in range(self.count - 2))]
        sizes = list(reversed(later[: self.count - 1]))
        first = tokens - sum(sizes)
        return [first + sum(sizes[:i]) for i in range(self.count)]

    @override
    def lookahead(self, tokens: int) -> int:
        ends = self.ends(tokens)
        return max(end - start for start, end in zip([0, *ends], ends, strict=False))

    @override
    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        steps = torch.frexp(canvas.layout.new_tokens.double()).exponent - 1  # [B] floor(log2 G)
        following = canvas.end
        for back in range(1, self.count):
            end = canvas.layout.first + 2 ** (steps - back) - 1  # of the block with `back` blocks after it, see `ends`
            following = torch.where(canvas.start < end, end, following)
        return torch.minimum(following, canvas.end)
