"""Kernels run in Triton's interpreter, which must be chosen before triton is imported, for a whole process.

So `test_interpreted.py` runs the other files of this folder in a process of their own, and nothing leaks into the
tests elsewhere. To run one by hand: `TRITON_INTERPRET=1 pytest -n0 tests/kernels/test_readout.py`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    aside = collection_path.name.startswith("test_") and collection_path.name != "test_interpreted.py"
    return True if not INTERPRETED and aside else None


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What a kernel is to write is NaN before, or the largest integer: what it leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    if not INTERPRETED and request.path.name != "test_interpreted.py":
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
