"""What tests of SGLang's adapter have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler

import pytest

from dllm_sampler.integrations import sglang
from tests.integrations.sglang_stubs import importable, installed


@pytest.fixture(params=["restated", pytest.param("released", marks=pytest.mark.slow)])
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    """Our algorithm in SGLang's registry: of the contract restated, and of the release where that is installed."""
    folder = installed() if request.param == "released" else None
    if request.param == "released" and folder is None:
        pytest.skip("sglang is not installed: pip install --no-deps sglang")
    with importable(folder):
        sglang.register()
        yield request.param
    sglang.BlockAlgorithm.live = None


@pytest.fixture
def released() -> Iterator[None]:
    """SGLang's own modules, where they are installed."""
    folder = installed()
    if folder is None:
        pytest.skip("sglang is not installed: pip install --no-deps sglang")
    with importable(folder):
        yield


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Errors that the test logs. Pytest's own plugin for logs costs a millisecond per test, and is off."""
    handler = BufferingHandler(capacity=99)
    handler.setLevel(logging.ERROR)
    logging.getLogger().addHandler(handler)
    yield handler.buffer
    logging.getLogger().removeHandler(handler)
