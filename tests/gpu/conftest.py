"""A kernel or a recording that gives way to torch would leave nothing to compare: on a GPU that is an error."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dllm_sampler.engine.loop import Engine
from dllm_sampler.errors import FallbackWarning
from dllm_sampler.kernels import backend

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the device is an error."""
    step = Engine.step

    def strict(self: Engine, state: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(self, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Engine, "step", strict)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What a kernel is to write is NaN before, or the largest integer: what it leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    backend.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield
    backend.forget()
