"""The most memory that was in use."""

from __future__ import annotations

import sys

import torch


def reset(device: torch.device) -> None:
    """Begin to measure: what a GPU used before does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Bytes: of the GPU since the last reset, else of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
