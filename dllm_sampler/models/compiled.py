"""Layers as the parts that a cache drives, as they are or compiled by torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import LayerParts
from dllm_sampler.kernels.compiling import compiled
from dllm_sampler.models.transformer import Layer, Rope


@dataclass(frozen=True)
class Parts(LayerParts):
    """One layer, taken apart.

    Args:
        layer: the module.
        together: `[T]` see `Layer.mlp`. None if each token chooses its experts alone.
        compile: compile each part. Code of a cache between the parts is not compiled.
    """

    layer: Layer
    together: Tensor | None = None
    compile: bool = False

    def call(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `part`, a method of `Layer`, for this layer."""
        return (compiled(part) if self.compile else part)(self.layer, *arguments)

    @override
    def qkv(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        return self.call(Layer.qkv, hidden, rope)

    @override
    def values(self, hidden: Tensor) -> Tensor:
        return self.call(Layer.values, hidden)

    @override
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.call(Layer.attend, q, k, v, mask)

    @override
    def output(self, heads: Tensor) -> Tensor:
        return self.call(Layer.output, heads)

    @override
    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.call(Layer.weights, q, k, mask)

    @override
    def mlp(self, hidden: Tensor) -> Tensor:
        return self.call(Layer.mlp, hidden, self.together)
