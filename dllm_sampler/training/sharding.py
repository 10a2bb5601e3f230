"""Weights spread over processes (FSDP2), and whole ones of them for files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dllm_sampler.models.transformer import Transformer


def shard(network: Transformer, device: torch.device, processes: int) -> None:
    """Spread a network's weights over all processes, in place; a layer's come together when it is run."""
    mesh = init_device_mesh(device.type, (processes,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in main memory, put together from all processes if it is spread over them; all of them must ask."""
    full: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor where and as `other` is: spread over processes, or not."""
    if isinstance(other, DTensor) and tensor.shape == other.shape:
        return distribute_tensor(tensor.to(other.to_local().device), other.device_mesh, other.placements)
    return tensor.to(other.device)
