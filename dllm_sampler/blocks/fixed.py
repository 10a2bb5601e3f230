"""Blocks of one length."""

from dataclasses import dataclass, field, replace
from typing import Self

from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Blocks, Context
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.errors import UserError

DEFAULT_LENGTH = 32  # LLaDA's


@dataclass(frozen=True)
class FixedBlocks(Blocks):
    """Consecutive blocks of equal length.

    They are counted from the end of the prompt (LLaDA, arXiv 2502.09992). For block-causal models (SDAR, arXiv
    2510.06303; LLaDA2, arXiv 2512.15745) they are counted from the row's first token, as a rule. The prompt's last
    tokens may then be the beginning of the first block. The last block is shorter if the answer ends inside it.
    Published block-causal samplers decode it to its end and drop the surplus.

    Args:
        length: positions per block. By default the length the model was trained on, or 32 if that is not one length.
        part: positions of the parts in which a block is decoded, left to right, for block-causal models only. Each part
            sees the whole block (Fast-dLLM v2's sub-blocks, arXiv 2509.26328). By default blocks have no parts.

    Raises:
        UserError: in `bind`, if `part` is set and the model is not block-causal, or `part` does not divide `length`.
    """

    length: int | None = None
    part: int | None = None
    causal: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("blocks.length", self.length, optional=True)
        check_count("blocks.part", self.part, optional=True)

    @override
    def bind(self, context: Context) -> Self:
        spec = context.spec
        length, causal = self.length or spec.block_length or DEFAULT_LENGTH, spec.attention == "block_causal"
        if self.part is not None and not causal:
            raise UserError("blocks-incompatible", f"blocks.part={self.part} needs a block-causal model. Remove it.")
        if self.part is not None and length % self.part:
            raise UserError(
                "option-range",
                f"blocks.part={self.part} does not divide blocks.length={length}. Set a divisor of {length}.",
            )
        return with_bound_fields(replace(self, length=length), causal=causal)

    @property
    @override
    def grid(self) -> int | None:
        return self.length if self.causal else None

    @override
    def lookahead(self, tokens: int) -> int:
        return min(self.part or self.length or DEFAULT_LENGTH, tokens)


@dataclass(frozen=True)
class FullBlock(Blocks):
    """One block: the whole generation may be decoded in any order (full diffusion; Dream, arXiv 2508.15487)."""

    @override
    def lookahead(self, tokens: int) -> int:
        return tokens
