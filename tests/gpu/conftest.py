"""A kernel or a recording that gives way to torch would leave nothing to compare: on a GPU that is an error."""

import warnings
from collections.abc import Iterator

import pytest

from dllm_sampler.errors import FallbackWarning
from dllm_sampler.kernels import backend


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    backend.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield
    backend.forget()
