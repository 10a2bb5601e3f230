"""The GPU of a step: made the current one, and its launches recorded as a CUDA graph."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any

import torch

_ALONE = Lock()  # a recording begins by waiting for the whole GPU, which fails during one of another thread
Record = Callable[[Callable[[], None]], Callable[[], None]]  # makes a function repeatable, without its effects


class GraphRecorder:
    """A recorder of functions as CUDA graphs, which share a pool of memory.

    Graphs of one recorder must be replayed one after the other, because each may overwrite the results of another. So
    every engine has a recorder of its own. Recorders of several threads take turns.
    """

    def __init__(self) -> None:
        self._pools: dict[int, tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]] = {}  # by GPU

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `run` on the current GPU, and return a function that replays them.

        No launch happens before a replay. A recording owns only the memory that was allocated while it was made, so
        every tensor that `run` reads must outlive it.
        """
        device, graph = torch.cuda.current_device(), torch.cuda.CUDAGraph()
        try:
            # A capture that failed cannot be ended either, and then leaves its stream the current one.
            with _ALONE, torch.cuda.stream(torch.cuda.current_stream()):
                torch.cuda.current_blas_handle()  # of this thread: none can be made during a recording (pytorch 99397)
                pool, stream, _ = self._pool(device)
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    run()
        except BaseException:
            failed = self._pools.pop(device, None)
            if failed is not None:
                _close(device, failed[0])
            raise
        return graph.replay

    def _pool(self, device: int) -> tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]:
        """Return the pool of memory on a GPU, the stream that graphs are recorded on, and an empty recording.

        A pool whose graphs are all gone takes no new one while anything is still allocated in it, such as a library's
        workspace. The empty recording keeps it open.
        """
        if device not in self._pools:
            pool, stream, empty = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is empty
                with torch.cuda.graph(empty, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    pass
            self._pools[device] = pool, stream, empty
        return self._pools[device]


def _close(device: int, pool: Any) -> None:
    """Close a pool after a capture that failed, if torch has left it open.

    torch 2.11 and earlier continue to allocate in it (pytorch 180395): the next capture can fail, and cached memory is
    never released. Later versions have closed it, and closing it again raises an error.
    """
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@contextmanager
def no_grad_on_device(device: torch.device, inference: bool = False) -> Iterator[None]:
    """Run the body without gradients, in torch's inference mode if `inference` is true, and on `device`.

    A GPU becomes the current one: Triton's launches and CUDA graphs go there, wherever their tensors are.
    """
    with (
        torch.inference_mode() if inference else torch.no_grad(),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
    ):
        yield
