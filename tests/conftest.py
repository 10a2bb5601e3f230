"""What every test stands on: one thread per worker, and a tiny random LLaDA checkpoint with a tokenizer.

The process that hands tests to the workers reads this file too, and imports nothing of it that takes seconds.
"""

import gc
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import sampling

# Automata of forms stay in the checkout, not in a home folder.
os.environ["DLLM_SAMPLER_CACHE"] = str(Path(__file__).parents[1] / ".pytest_cache" / "dllm_sampler")
# Two workers share two cores, and the tests' tensors are small. So are those of the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so a shell starts what it runs with &: no Ctrl-C would come
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # collecting tests imports half of Python: a quarter of that time went into looking for garbage


def pytest_configure(config: pytest.Config) -> None:
    """Do not collect slow tests only to deselect them: there are as many of them as of the others.

    A test that is named by `FILE::TEST` is still found, and deselected.
    """
    sampling.leaves_out_slow = config.option.markexpr == "not slow" and not any("::" in arg for arg in config.args)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files whose tests are all slow: what they import takes seconds."""
    if not sampling.leaves_out_slow or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", text, re.MULTILINE) else None


def pytest_pycollect_makeitem(obj: object) -> list[pytest.Item] | None:
    """Leave out slow functions and classes."""
    marks = getattr(obj, "pytestmark", [])
    return [] if sampling.leaves_out_slow and any(mark.name == "slow" for mark in marks) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    """Give hypothesis no constants of our sources: it parses all of them, and a new one would change examples."""
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if sampling.leaves_out_slow and hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """Everything imported stays: the collector skips it from here on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before in this process: a warning given once per process comes, and a class has its own name."""
    from dllm_sampler.core import naming
    from dllm_sampler.kernels import backend

    backend.warn.cache_clear()
    monkeypatch.setattr(naming, "_TYPED", dict(naming._TYPED))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer LLaDA over `WORDS`, context 64, and its word tokenizer."""
    from tests.checkpoint import write

    return write(tmp_path_factory.mktemp("checkpoint"))
