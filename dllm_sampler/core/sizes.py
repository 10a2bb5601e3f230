"""What a canvas carries besides tokens: the sizes of the next step, and the noise. What a forward cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class Sizes:
    """What the host reads between two steps: the static sizes of the next one. See `packing.measure`."""

    queries: int  # no row asks about more positions
    block: int  # no live row's block is wider
    computed: int  # T: entries of the pack, over all rows
    answers: int  # R: rows of the head, over all rows
    longest: int  # no row has more entries
    whole: bool  # every live row computes all columns that it has, and the query hides none
    opens: bool = True  # some live row opens a block
    rows: tuple[tuple[int, int], ...] | None = None  # entries and end of each row; None: not fixed
    stretch: int | None = None  # no live row's is longer (`core/stretch.py`); None: not measured


@dataclass(frozen=True)
class Spent:
    """What a forward cost each row, nothing for finished ones; the loop adds it up."""

    nfe: Tensor  # [B] passes
    computed: Tensor  # [B] positions computed, candidates and guidance branches included


class Noise(Protocol):
    """A source of noise for one batch. `positions` is `[B, Q]`; its padding may get any value."""

    def tokens(self, canvas: Canvas, answers: Any, vocab: int) -> Tensor:
        """`[R, V]` standard Gumbel noise for `answers` (`packing.Answers`): argmax(logits + noise) samples softmax."""
        ...

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """`[B, Q]` Gumbel noise for ranking positions: a top-k of score + noise samples without replacement."""
        ...

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """`[B, Q]` uniform in (0, 1)."""
        ...

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """`[B, Q] int64` token ids, each as likely as any other: the noise of uniform diffusion."""
        ...
