"""Runs the files of this folder in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process")


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
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
