"""Recording launches as a CUDA graph, and recordings that look for themselves whether they are wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dllm_sampler.kernels.backend import first_line, warn


class Record(Protocol):
    """Makes a function repeatable, without its effects."""

    def __call__(self, run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], None]:
        """What repeats `run`, or with `wanted` (`[] bool`, on the device) does nothing where that says so by then."""
        ...


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


def cuda(run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], None]:
    """Record a function's launches on the current GPU as a CUDA graph; none of them happens before a replay.

    A recording owns what was allocated while it was made, nothing else: whatever `run` reads has to outlive it.

    Args:
        wanted: what it makes is looked at in each replay, on the device: `run` is a conditional node behind it.
    """
    graph = torch.cuda.CUDAGraph()
    # Graphs may share memory: each copies what it made into buffers that belong to none of them.
    try:
        # A capture that failed cannot be ended either, and then leaves its stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()):
            pool, stream, _ = _resources(torch.cuda.current_device())
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                if wanted is None:
                    run()
                else:
                    graph.begin_capture_to_if_node(wanted())
                    try:
                        run()
                    finally:  # else the node's stream would stay the current one
                        graph.end_capture_to_conditional_node()
    except BaseException:
        _resources.cache_clear()  # a capture that was not ended keeps its pool to itself
        raise
    return graph.replay


@cache
def chooses(device: torch.device) -> bool:
    """Whether recordings on a device can look for themselves whether they are wanted; tried once.

    It takes CUDA 12.4 and a driver that knows of it. GPUs of AMD have nothing like it, and before 2.13 torch may record
    a node on the stream that its graph is recorded on.
    """
    if device.type != "cuda" or torch.version.hip is not None or torch.__version__ < "2.13":
        return False
    try:
        with torch.cuda.device(device):
            return obeys(cuda, device)
    except Exception as error:  # of CUDA, the driver or an older torch, of no common base
        warn(f"the host waits for a step before it sends the next, no graph can be conditional: {first_line(error)}")
        return False


def obeys(record: Record, device: torch.device) -> bool:
    """Whether what `record` makes runs where it is wanted, and only there."""
    wanted, count = torch.zeros((), dtype=torch.bool, device=device), torch.zeros((), device=device)
    count.add_(0)  # loads the kernel, which a recording may not do
    replay = record(lambda: [count.add_(1)].clear(), wanted.clone)
    seen: list[float] = []
    for answer in (False, True, False):
        wanted.fill_(answer)
        replay()
        seen.append(count.item())
    return seen == [0, 1, 1]
