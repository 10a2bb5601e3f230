"""Ranks that share a model's weights (FSDP2) gather them in each forward, so all must run equally many forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dllm_sampler.engine.graphs import networks

if TYPE_CHECKING:
    from dllm_sampler.core.protocols import Denoiser


@dataclass(frozen=True)
class Ranks:
    """The ranks among which a model's weights are sharded. There is a single rank if `mesh` is None."""

    mesh: Any = None

    @staticmethod
    def of(denoiser: Denoiser) -> Ranks:
        """Return the ranks among which a denoiser's weights are sharded."""
        weights = (weight for network in networks(denoiser) for weight in network.parameters())
        mesh = next((found for weight in weights if (found := getattr(weight, "device_mesh", None)) is not None), None)
        return Ranks(None if mesh is None or mesh.size() == 1 else mesh)

    def max_over_ranks(self, value: int) -> int:
        """Return the largest `value` of any rank. Collective: every rank must call it."""
        if self.mesh is None:
            return value
        found = torch.tensor(value, device=self.mesh.device_type)
        for dimension in range(self.mesh.ndim):
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, self.mesh.get_group(dimension))
        return int(found)
