"""The choice of positions without a read of the device. Of equal scores the lower position wins."""

from functools import cache, lru_cache
from threading import Lock

import torch
from torch import Tensor

_ALONE = Lock()  # two threads would each make a tensor, and one of them would be freed again


def arange(size: int, device: torch.device) -> Tensor:
    """Return `[size] int64` 0, 1, 2, ... Never write to it: it may be a view of a shared tensor."""
    # A compiled part makes them for free.
    return torch.arange(size, device=device) if torch.compiler.is_compiling() else _view(size, device)


def line(size: int, device: torch.device) -> Tensor:
    """Return `arange(size, device)` as `[1, size]`, to compare with one number of each row."""
    return arange(size, device)[None] if torch.compiler.is_compiling() else _line(size, device)


@lru_cache(1024)
def _line(size: int, device: torch.device) -> Tensor:
    return _view(size, device)[None]


@lru_cache(1024)
def _view(size: int, device: torch.device) -> Tensor:
    with _ALONE:
        return _numbers(1 << max(0, size - 1).bit_length(), device)[:size]


@cache  # for good: a recorded step (`engine/graphs.py`) reads these tensors where they are
def _numbers(size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        made = torch.arange(size, device=device)
    wait_for(device)
    return made


def wait_for(device: torch.device) -> None:
    """Wait until a tensor that is stored for good has its values: streams of other threads will read it, too."""
    if device.type == "cuda" and torch.cuda.is_initialized() and not torch.compiler.is_compiling():
        torch.cuda.current_stream(device).record_event().synchronize()


def columns(chosen: Tensor, width: int) -> Tensor:
    """Return the sorted column numbers of a set, in a static size.

    Args:
        chosen: `[B, L+1] bool`, never true at the empty slot L.
        width: number of columns to return. Rows with more lose the last ones, and rows with fewer pad with L.

    Returns:
        `[B, width] int64`.
    """
    batch, size = chosen.shape
    column = arange(size, chosen.device).expand(batch, size)
    # Members go to the places 1 to width; the others to 0, those that are too many to width + 1.
    place = (chosen.cumsum(1) * chosen).clamp(max=width + 1)
    return column.new_full((batch, width + 2), size - 1).scatter_(1, place, column)[:, 1 : width + 1]


def rank(score: Tensor, eligible: Tensor) -> Tensor:
    """Return `[B, Q]` the rank of each eligible position by descending score, 0 for the best. The others come last."""
    # An eligible score of -inf still comes before every ineligible position.
    score = score.clamp(min=torch.finfo(score.dtype).min).masked_fill(~eligible, -torch.inf)
    order = score.argsort(dim=1, descending=True, stable=True)
    place = arange(score.shape[1], score.device).expand_as(order)
    return order.scatter(1, order, place)


def top(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """Return `[B, Q] bool` the `count [B]` best eligible positions by score `[B, Q]`, or all if there are fewer."""
    return (rank(score, eligible) < count[:, None]) & eligible


def at_least_one(chosen: Tensor, score: Tensor, eligible: Tensor) -> Tensor:
    """Return `[B, Q] bool` the eligible among `chosen`, and the best eligible position in any case."""
    best = score.masked_fill(~eligible, -torch.inf).amax(1, keepdim=True)
    leader = eligible & (score >= best)
    return eligible & (chosen | (leader & (leader.cumsum(1) == 1)))
