"""LocalLeap's relaxed threshold as in its published code."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.schedulers.localleap import LocalLeap


@dataclass(frozen=True)
class PublishedLocalLeap(LocalLeap):
    """LocalLeap that tests anchors and their neighbours with `relaxed` alone, which may exceed `threshold`.

    Source: LocalLeap, arXiv 2510.07081.
    """

    @override
    def ready(self, anchor: Tensor, near: Tensor, sure: Tensor) -> Tensor:
        return near & (sure >= self.relaxed)
