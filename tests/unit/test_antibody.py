"""The example with a real model: an antibody language model from a package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import Sampler

FILE = Path(__file__).parents[2] / "examples" / "antibody.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("antibody", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gaps_hide_what_they_say(example: Any) -> None:
    for text, truth in example.windows():
        assert text.replace(f"{{gap:{example.GAP}}}", truth) in example.CHAINS.values()


@pytest.mark.slow
def test_the_model_recovers_residues_in_fewer_forwards(example: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "package")]
    done = subprocess.run([*command, "antiberty==0.1.3"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install antiberty: {done.stderr.strip().splitlines()[-1:]}")
    model = example.convert(tmp_path / "package", tmp_path / "model")
    sampler = Sampler.from_pretrained(
        str(model), blocks="full", stop="none", cache="none", dtype="float32", device="cpu"
    )
    asked = example.windows()[:2]
    truth = "".join(missing for _, missing in asked)
    slow, whole = example.fill(sampler, asked, "fixed", {"steps": 32})
    fast, some = example.fill(sampler, asked, "threshold", {"threshold": 0.9})
    assert slow == 32
    assert fast < 24
    assert example.share(whole, truth) > 0.4, "far above the 5 % of a guess"
    assert example.share(some, whole) > 0.9
