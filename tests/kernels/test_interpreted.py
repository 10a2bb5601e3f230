"""Runs the files of this folder in processes in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="they run in this process")
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", f"--confcutdir={HERE}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(HERE / name)], env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
