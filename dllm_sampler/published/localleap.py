"""LocalLeap's relaxed threshold, as its code has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.schedulers.localleap import LocalLeap


@dataclass(frozen=True)
class PublishedLocalLeap(LocalLeap):
    """Near an anchor, which is near itself, only `relaxed` counts: above `threshold` it takes back what that allows.

    Source: LocalLeap, arXiv 2510.07081.
    """

    @override
    def ready(self, anchor: Tensor, near: Tensor, sure: Tensor) -> Tensor:
        return near & (sure >= self.relaxed)
