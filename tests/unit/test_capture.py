"""Recording a CUDA graph, against a stand-in for torch.cuda that fails where torch does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dllm_sampler.engine import capture


class Graph:
    replay = staticmethod(lambda: None)


class Cuda:
    """Pools, streams and captures of a GPU. What a library allocated in a pool stays there for ever."""

    def __init__(self) -> None:
        self.stream: object = "main"
        self.graphs: dict[object, weakref.WeakSet[Graph]] = {}  # by pool, once one was captured in it
        self.busy: set[object] = set()  # pools whose capture was not ended

    def enter(self, graph: Graph, pool: object, stream: object) -> None:
        self.stream = stream
        if pool in self.busy:
            raise RuntimeError("already recording to this pool")
        if pool in self.graphs and not self.graphs[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.busy.add(pool)
        self.graphs.setdefault(pool, weakref.WeakSet()).add(graph)

    def exit(self, pool: object, before: object, failed: bool) -> None:
        if failed:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.busy.remove(pool)
        self.stream = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()

    class Capture:
        def __init__(self, graph: Graph, pool: object, stream: object, capture_error_mode: str):
            self.graph, self.pool, self.stream = graph, pool, stream

        def __enter__(self) -> None:
            self.before = cuda.stream
            cuda.enter(self.graph, self.pool, self.stream)

        def __exit__(self, kind: Any, *_: object) -> None:
            cuda.exit(self.pool, self.before, kind is not None)

    class Stream:
        def __init__(self, stream: object):
            self.stream = stream

        def __enter__(self) -> None:
            self.before, cuda.stream = cuda.stream, self.stream

        def __exit__(self, *_: object) -> None:
            cuda.stream = self.before

    fake = {
        "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": object, "Stream": lambda device: object(),
        "stream": Stream, "current_stream": lambda: cuda.stream, "current_device": lambda: 0,
    }  # fmt: skip
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture._resources.cache_clear()
    yield cuda
    capture._resources.cache_clear()


def test_a_pool_outlives_its_recordings(gpu: Cuda) -> None:
    """Each is gone before the next is made, as a generation of another size makes it."""
    ran: list[tuple[int, object]] = []
    for number in range(3):
        replay = capture.cuda(lambda number=number: ran.append((number, gpu.stream)))
        replay()
        del replay
    assert [number for number, _ in ran] == [0, 1, 2] and len(gpu.graphs) == 1
    assert gpu.stream == "main" not in {stream for _, stream in ran}


def test_a_capture_that_fails_leaves_the_stream_and_the_next_one_alone(gpu: Cuda) -> None:
    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        capture.cuda(fails)
    assert gpu.stream == "main"
    capture.cuda(lambda: None)
    assert gpu.stream == "main"
