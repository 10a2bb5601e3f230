"""Runs the files of this folder in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from packaging.version import Version

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent
# An index of `range` in a kernel becomes int(array of one element); Triton 3.7 takes the element out first.
REFUSED = Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process"),
    pytest.mark.skipif(REFUSED, reason="Triton's interpreter before 3.7 calls int() as numpy 2.4 no longer allows"),
]


@pytest.mark.parametrize("marked", ["not slow", "slow"])
def test_interpreted(marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", "-p", "tests.kernels.quicker"]
    run = subprocess.run(
        [*command, f"--confcutdir={HERE}", "-m", marked, str(HERE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
