"""Processes that train together, weights spread over them (FSDP2), and whole ones of these for files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dllm_sampler.errors import UserError


def start(device: torch.device) -> tuple[Accelerator, torch.device]:
    """The process alone on its device, or one of those of a `torchrun`, each on its own.

    Raises:
        UserError: it was launched in another way of accelerate's.
    """
    found = Accelerator(cpu=device.type == "cpu")
    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if found.distributed_type not in kinds:
        raise UserError("processes-unsupported", f"dllm-train supports DDP, not {found.distributed_type.value}")
    return found, device if found.num_processes == 1 else found.device


def check_alone(task: str) -> None:
    """Refuse several processes where a trainer knows nothing of others.

    Raises:
        UserError: there are some.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("processes-unsupported", f"train={task} runs in one process. Start it without torchrun.")


Unit = nn.Module | list[nn.Module]  # a module whose weights come together when it runs, or several that run together


def shard(network: nn.Module, device: torch.device, processes: int, units: Iterable[Unit] | None = None) -> None:
    """Spread a network's weights over all processes, in place; the weights of a unit come together when it runs.

    units: by default the layers
    """
    mesh = init_device_mesh(device.type, (processes,))
    for unit in list(_layers(network)) if units is None else units:
        fully_shard(unit, mesh=mesh)
    fully_shard(network, mesh=mesh)


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    """What the outermost lists of modules hold: the layers, in our networks and in those of transformers."""
    for child in network.children():
        if isinstance(network, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _layers(child)


def reshard(network: nn.Module) -> None:
    """Let go of weights that came together for a forward, so that the next one reads them as they are now."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Give each process all weights of a sharded network inside the context, which all processes must enter.

    The network must have made a forward before: FSDP2 takes the first module that runs for the outermost one.
    """
    units = [module for module in network.modules() if isinstance(module, FSDPModule)]
    inner = [unit for unit in units if unit is not network]  # the outermost one keeps its weights until a backward pass
    for unit in inner:
        unit.set_reshard_after_forward(False, recurse=False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in inner:
            unit.set_reshard_after_forward(True, recurse=False)
        reshard(network)


def anyone(holds: bool, device: torch.device) -> bool:
    """Whether it holds in any of the processes, of which there may be one; all of them must ask."""
    if not torch.distributed.is_initialized():
        return holds
    found = torch.tensor(int(holds), device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in main memory, put together from all processes if it is spread over them; all of them must ask."""
    full: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor where and as `other` is: spread over processes, or not."""
    if isinstance(other, DTensor) and tensor.shape == other.shape:
        return distribute_tensor(tensor.to(other.to_local().device), other.device_mesh, other.placements)
    return tensor.to(other.device)
