"""The GPU of a step: made the current one, and its launches recorded as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

Record = Callable[[Callable[[], None]], Callable[[], None]]  # makes a function repeatable, without its effects


@cache
def _resources(device: int) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """What the recordings on one GPU share: a pool of memory, the stream they are made on, and an empty recording.

    A pool whose graphs are all gone takes no new one while anything still lives in it, such as a library's workspace.
    The empty recording keeps it open.
    """
    pool, stream, empty = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is empty
        with torch.cuda.graph(empty, pool=pool, stream=stream, capture_error_mode="thread_local"):
            pass
    return pool, stream, empty


def cuda(run: Callable[[], None]) -> Callable[[], None]:
    """Record a function's launches on the current GPU as a CUDA graph; none of them happens before a replay.

    A recording owns what was allocated while it was made, nothing else: whatever `run` reads has to outlive it.
    """
    graph = torch.cuda.CUDAGraph()
    # Graphs may share memory: each copies what it made into buffers that belong to none of them.
    try:
        # A capture that failed cannot be ended either, and then leaves its stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()):
            pool, stream, _ = _resources(torch.cuda.current_device())
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
    except BaseException:
        _resources.cache_clear()  # a capture that was not ended keeps its pool to itself
        raise
    return graph.replay


@contextmanager
def undisturbed(device: torch.device, inference: bool = False) -> Iterator[None]:
    """Without gradients, in torch's inference mode where `inference` is true, and with a GPU as the current one.

    Triton's launches and CUDA graphs go to the current one, wherever their tensors are.
    """
    with (
        torch.inference_mode() if inference else torch.no_grad(),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
    ):
        yield
