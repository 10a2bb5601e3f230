"""Number of torch's threads in a command. The library itself does not set it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

SMALL = 20_000_000  # parameters below which one thread is best on a CPU: docs/kernels.md
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # environment variables that torch reads


def choose(threads: int | str, parameters: int | None, device: str) -> None:
    """Set the number of torch's threads for a model.

    Args:
        threads: a number, or `auto`: one for a small model on a CPU, else torch's default. `auto` changes nothing if an
            environment variable of `VARIABLES` is set.
        parameters: number of parameters of the model, or None if unknown.
        device: device of the model, for example `cuda:0`.
    """
    import torch

    default = _default()
    if not isinstance(threads, str):
        torch.set_num_threads(threads)
    elif not are_set():
        small = device.startswith("cpu") and parameters is not None and parameters < SMALL
        torch.set_num_threads(1 if small else default)


def are_set() -> bool:
    """Return True if an environment variable of `VARIABLES` is set."""
    return any(os.environ.get(name) for name in VARIABLES)


def parameters(networks: Iterable[nn.Module]) -> int:
    """Return the number of parameters of all networks together."""
    return sum(weight.numel() for network in networks for weight in network.parameters())


@cache
def _default() -> int:
    """Return torch's number of threads before a command sets it."""
    import torch

    return torch.get_num_threads()
