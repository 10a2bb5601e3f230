"""The contract of a transformer layer that a cache can drive."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class LayerParts(Protocol):
    """One transformer layer, taken apart so that a cache can drive it. A pack has N = 1 and M = T."""

    def qkv(self, hidden: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated heads of `[N, M, D]`: q `[N, H, M, Dh]`, k and v `[N, Hkv, M, Dh]`."""
        ...

    def values(self, hidden: Tensor) -> Tensor:
        """Values alone `[N, Hkv, M, Dh]` of `[N, M, D]`, as in `qkv`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and output projection `[N, M, D]`, residual not added; mask bool, broadcast to `[N, 1, M, S]`."""
        ...

    def output(self, heads: Tensor) -> Tensor:
        """The output projection `[N, M, D]` of attention `[N, H, M, Dh]`."""
        ...

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention probabilities `[N, H, M, S]`, for caches that look at them; arguments as `attend`."""
        ...

    def mlp(self, hidden: Tensor) -> Tensor:
        """Norm and feed-forward `[N, M, D]`, residual not added."""
        ...
