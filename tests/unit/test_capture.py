"""Recording a CUDA graph, against a stand-in for torch.cuda that fails where torch does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler import capture, layout
from dllm_sampler.buffers import Buffers
from dllm_sampler.kernels import backend


class Graph:
    replay = staticmethod(lambda: None)
    nodes: ClassVar[list[object]] = []  # of all
    open: ClassVar[list[object]] = []  # streams of nodes that were not ended

    def begin_capture_to_if_node(self, wanted: object) -> None:
        self.nodes.append(wanted)
        self.open.append(wanted)

    def end_capture_to_conditional_node(self) -> None:
        self.nodes.append("end")
        self.open.pop()


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
    Graph.nodes.clear()
    Graph.open.clear()

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
        "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": object, "Stream": lambda device: SimpleNamespace(),
        "stream": Stream, "current_stream": lambda: cuda.stream, "current_device": lambda: 0,
    }  # fmt: skip
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture._resources.cache_clear()
    yield cuda
    capture._resources.cache_clear()


def test_a_pool_outlives_its_recordings(gpu: Cuda) -> None:
    """Each is gone before the next is made, as a generation of another size makes it."""
    for _ in range(3):
        replay = capture.cuda(lambda: None)
        replay()
        del replay
    assert len(gpu.graphs) == 1
    assert gpu.stream == "main"


def test_a_capture_that_fails_leaves_the_stream_and_the_next_one_alone(gpu: Cuda) -> None:
    def fails() -> None:
        assert gpu.stream != "main"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        capture.cuda(fails)
    assert gpu.stream == "main"
    capture.cuda(lambda: None)


def test_what_may_not_be_wanted_is_a_node_behind_the_question(gpu: Cuda) -> None:
    order: list[str] = []
    replay = capture.cuda(lambda: order.append("run"), lambda: cast(Any, [order.append("ask"), "asked"][1]))
    assert order == ["ask", "run"] and Graph.nodes == ["asked", "end"]
    replay()
    assert gpu.stream == "main" and not gpu.busy


def test_a_node_that_fails_leaves_the_next_recording_alone(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Graph, wanted: object) -> None:
        raise RuntimeError("conditional nodes are not supported for cuda version < 12.4")

    monkeypatch.setattr(Graph, "begin_capture_to_if_node", refuses)
    with pytest.raises(RuntimeError):
        capture.cuda(lambda: None, lambda: torch.ones(()))
    assert gpu.stream == "main"
    capture.cuda(lambda: None)


def test_what_fails_inside_a_node_ends_it(gpu: Cuda) -> None:
    """The node has a stream of its own, which torch leaves the current one until then."""

    def fails() -> None:
        assert Graph.open == ["asked"]
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        capture.cuda(fails, lambda: cast(Any, "asked"))
    assert not Graph.open and gpu.stream == "main"
    capture.cuda(lambda: None)


def eager(run: Callable[[], None], wanted: Callable[[], Tensor] | None = None) -> Callable[[], None]:
    return lambda: run() if wanted is None or bool(wanted()) else None


def test_whether_recordings_choose_is_tried() -> None:
    cpu = torch.device("cpu")
    assert capture.obeys(eager, cpu)
    assert not capture.obeys(lambda run, wanted=None: run, cpu)
    assert not capture.obeys(lambda run, wanted=None: lambda: None, cpu)
    assert not capture.chooses(cpu)


def test_a_gpu_without_conditional_graphs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> bool:
        raise RuntimeError("CUDA Graphs conditional nodes are not supported for cuda version < 12.4")

    monkeypatch.setattr(capture, "obeys", refuses)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    capture.chooses.cache_clear()
    backend.warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="waits for a step before.*not supported for cuda version"):
        assert not capture.chooses(torch.device("cuda"))
    capture.chooses.cache_clear()


small, ages = st.integers(0, 40), st.sampled_from([0, 1, 7])


@given(
    st.tuples(small, small, ages, ages, small, small, st.sampled_from([0, 3])),
    st.booleans(),
    st.booleans(),
    small,
    st.sampled_from(["masks", "block", "computed"]),
)
def test_the_device_and_the_host_agree_on_what_fits(
    numbers: tuple[int, ...], goes_on: bool, bad: bool, more: int, less: str
) -> None:
    """The sizes that were read fit, and larger ones, not smaller ones, nor a step of another kind."""
    masks, block, youngest, oldest, reach, computed, part = numbers
    measured = [int(goes_on), int(bad), masks, block, -youngest, oldest, reach, computed, part]
    found = layout.read(cast(Any, SimpleNamespace(length=40)), measured, True).sizes
    if found is None:
        return
    buffers = Buffers(())
    buffers.ask(torch.zeros(layout.SIZES, dtype=torch.int64))
    wide = replace(found, masks=found.masks + more, block=found.block + more, computed=found.computed + more)
    narrow = replace(found, **{less: getattr(found, less) - 1})
    buffers.ask(torch.tensor(measured))
    others = [replace(wide, opens=not found.opens, all_open=False), replace(wide, whole=not found.whole)]
    some = replace(wide, all_open=False)
    for sizes in (found, wide, some, narrow, *others):
        fits = layout.fit(measured, sizes)
        assert bool(buffers.wanted(sizes)()) == fits
        if sizes in others or (sizes is narrow and (less != "computed" or part)):
            assert not fits
        elif sizes is not narrow:
            assert fits == (not bad)
    if not bad:
        assert layout.fit(measured, replace(found, all_open=True)) == (oldest == 0)
