"""Where blocks end."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dllm_sampler.canvas import Canvas, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.protocols import Blocks, Context

DEFAULT_LENGTH = 32  # LLaDA's


@dataclass(frozen=True)
class FixedBlocks(Blocks):
    """Consecutive blocks of equal length.

    They are counted from the end of the prompt (LLaDA, arXiv 2502.09992), and for block-causal models (SDAR, arXiv
    2510.06303; LLaDA2, arXiv 2512.15745), whose attention knows blocks too, from the row's first token: there the
    prompt's last tokens may be the beginning of the first block. The last block is shorter where the generation ends
    inside it; published block-causal samplers decode it to its end and drop what is too long.

    Args:
        length: positions per block; None: what the model was trained on, 32 if that is no one length.
    """

    length: int | None = None
    causal: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        length = self.length
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise UserError(f"blocks.length must be a whole number of at least 1, not {length!r}")

    def bind(self, context: Context) -> Self:
        """Take the model's own length and whether its attention knows blocks."""
        spec = context.spec
        bound = replace(self, length=self.length or spec.block_length or DEFAULT_LENGTH)
        object.__setattr__(bound, "causal", spec.attention == "block_causal")
        return bound

    @property
    def grid(self) -> int | None:
        """See `Blocks.grid`."""
        return self.length if self.causal else None

    def lookahead(self, tokens: int) -> int:
        """See `Blocks.lookahead`."""
        return min(self.length or DEFAULT_LENGTH, tokens)


@dataclass(frozen=True)
class FullBlock(Blocks):
    """One block: the whole generation may be decoded in any order (full diffusion; Dream, arXiv 2508.15487)."""

    def lookahead(self, tokens: int) -> int:
        """See `Blocks.lookahead`."""
        return tokens


@dataclass(frozen=True)
class AdaBlock(Blocks):
    """End a block at the surest delimiter ahead (a newline, say), where the model is sure enough of one.

    Source: AdaBlock-dLLM, arXiv 2509.26432. The forward that opens a block also sizes it: among the positions of the
    window whose candidate is a delimiter the most confident one ends the block, inclusively, if its confidence
    reaches the threshold; otherwise the block has `length` positions. The window is the published code's, a share of
    the whole generation (the paper's grows with what is decoded).

    Args:
        delimiters: token ids; none: fixed blocks.
        threshold: probability the delimiter must reach; above 1: fixed blocks.
        length: of a block without a delimiter; may exceed the window.
        window: share of the generation looked ahead.
    """

    sizes_on_open: ClassVar[bool] = True

    delimiters: tuple[int, ...] = (198,)
    threshold: float = 0.3
    length: int = 32
    window: float = 0.25

    def __post_init__(self) -> None:
        FixedBlocks(self.length)
        object.__setattr__(self, "delimiters", tuple(self.delimiters))
        if not self.threshold >= 0:
            raise UserError(f"blocks.threshold must be a probability from 0 on, not {self.threshold!r}")
        if not 0 <= self.window <= 1:
            raise UserError(f"blocks.window must be a share between 0 and 1, not {self.window!r}")

    def lookahead(self, tokens: int) -> int:
        """See `Blocks.lookahead`."""
        return min(max(self.length, int(self.window * tokens)), tokens)

    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """See `Blocks.open`."""
        tokens = canvas.length - canvas.origin
        ahead = query.positions - canvas.start[:, None]  # [B, Q]
        delimits = torch.zeros_like(ahead, dtype=torch.bool)
        for mark in self.delimiters:  # numbers, not a tensor: that would be a copy to the device in every step
            delimits |= readout.token[:, 0] == mark
        inside = canvas.eligible(query.positions) & (ahead < int(self.window * tokens))
        sure, surest = readout.confidence[:, 0].masked_fill(~(delimits & inside), -1.0).max(1)  # first on a tie
        found = canvas.start + ahead.gather(1, surest[:, None])[:, 0] + 1
        fallback = torch.minimum(canvas.start + self.length, canvas.end)
        return torch.where((sure >= self.threshold) & (sure >= 0), found, fallback)


@dataclass(frozen=True)
class AscendingBlocks(Blocks):
    """ASS's blocks: each later one is a single step of `scheduler=ascending` long.

    Source: ASS, arXiv 2509.23924. With S = floor(log2 G), the last block has 2^(S-1) + 1 + (G - 2^S) positions,
    those before it 2^(S-2), 2^(S-3), ...; the first one takes what remains.

    Args:
        count: blocks; at most S.
    """

    sizes_on_open: ClassVar[bool] = True

    count: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise UserError(f"blocks.count must be a whole number of at least 1, not {self.count!r}")

    def ends(self, tokens: int) -> list[int]:
        """Where the blocks of a generation of `tokens` end."""
        steps = tokens.bit_length() - 1
        if self.count > max(steps, 1):
            raise UserError(f"blocks.count={self.count} is more than the {steps} steps of {tokens} new tokens")
        later = [2 ** (steps - 1) + 1 + tokens - 2**steps, *(2 ** (steps - 2 - i) for i in range(self.count - 2))]
        sizes = list(reversed(later[: self.count - 1]))
        first = tokens - sum(sizes)
        return [first + sum(sizes[:i]) for i in range(self.count)]

    def lookahead(self, tokens: int) -> int:
        """See `Blocks.lookahead`."""
        ends = self.ends(tokens)
        return max(end - start for start, end in zip([0, *ends], ends, strict=False))

    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """See `Blocks.open`."""
        following = canvas.end
        for end in reversed(self.ends(canvas.length - canvas.origin)):
            following = torch.where(canvas.start < canvas.origin + end, canvas.origin + end, following)
        return torch.minimum(following, canvas.end)
