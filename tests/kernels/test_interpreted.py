"""Runs the files of this folder in processes in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}
LONG = {"test_sampler.py", "test_attention.py"}

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process")


def interpreted(names: set[str], marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", "-p", "tests.kernels.quicker"]
    command.append(f"--confcutdir={HERE}")
    run = subprocess.run(
        [*command, "-m", marked, *(str(HERE / name) for name in sorted(names))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("names", [FILES - LONG, FILES & LONG], ids=["short", "long"])  # a worker each
def test_interpreted(names: set[str]) -> None:
    interpreted(names, "not slow")


@pytest.mark.slow
def test_what_takes_longer() -> None:
    interpreted(FILES, "slow")
