"""Threads of torch in a command. Nothing else sets them: code that uses the library keeps its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

SMALL = 20_000_000  # parameters below which one thread is best on a CPU: docs/kernels.md
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # of the user's, which torch reads


def choose(threads: int | str, parameters: int | None, device: str) -> None:
    """Set the threads of torch for a model.

    Args:
        threads: a number, or `auto`: one for a small model on a CPU, else torch's own choice. With `auto`, a user who
            has set one of `VARIABLES` has chosen.
        parameters: of the model; None if not known.
        device: where it computes, as torch writes it.
    """
    import torch

    default = _default()
    if not isinstance(threads, str):
        torch.set_num_threads(threads)
    elif not are_set():
        small = device.startswith("cpu") and parameters is not None and parameters < SMALL
        torch.set_num_threads(1 if small else default)


def are_set() -> bool:
    """Return True if the user has chosen, by a variable of the environment."""
    return any(os.environ.get(name) for name in VARIABLES)


def parameters(networks: Iterable[nn.Module]) -> int:
    """Return the parameters of some networks."""
    return sum(weight.numel() for network in networks for weight in network.parameters())


@cache
def _default() -> int:
    """Return the threads that torch has before a command sets any."""
    import torch

    return torch.get_num_threads()
