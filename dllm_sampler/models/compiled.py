"""Layers whose parts `torch.compile` made: a cache drives them as it drives the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.models.transformer import Layer, Rope

VERSIONS = 1024


@cache
def compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """A method, of `Layer` say, compiled once for all objects: their tensors are arguments, sizes may vary."""
    return torch.compile(part)


@cache
def fullgraph(part: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a step, compiled for each set of plug-ins and number of rows that a process meets.

    torch gives up after 8 versions of one function, which a sweep over schedulers soon has.
    """
    from torch._dynamo import config  # takes a second to load

    return config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS)(compiled(part))


@dataclass(frozen=True)
class CompiledParts:
    """One layer, as `LayerParts`. What a cache puts between the parts (slots, choices, masks) is not compiled."""

    layer: Layer

    def qkv(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerParts.qkv`."""
        return compiled(Layer.qkv)(self.layer, hidden, rope)

    def values(self, hidden: Tensor) -> Tensor:
        """See `LayerParts.values`."""
        return compiled(Layer.values)(self.layer, hidden)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `LayerParts.attend`."""
        return compiled(Layer.attend)(self.layer, q, k, v, mask)

    def output(self, heads: Tensor) -> Tensor:
        """See `LayerParts.output`."""
        return compiled(Layer.output)(self.layer, heads)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `LayerParts.weights`."""
        return compiled(Layer.weights)(self.layer, q, k, mask)

    def mlp(self, hidden: Tensor) -> Tensor:
        """See `LayerParts.mlp`."""
        return compiled(Layer.mlp)(self.layer, hidden)
