"""The canvas in the terminal."""

import re

import pytest

from dllm_sampler import Sampler
from dllm_sampler.cli.live import figures
from dllm_sampler.cli.output import Totals


@pytest.mark.parametrize("stop", ["prefix", "none", "truncate", "block"])
def test_the_streams_figures_are_those_of_the_last_line(stop: str) -> None:
    """What stands behind an end token is counted by neither."""
    mini = Sampler.from_pretrained("mini", device="cpu", stop=stop)
    totals = Totals()
    *_, last = mini.stream(["copy: Ada, Ben", "reverse: Ada, Ben, Cal, Dan"], max_new_tokens=32, block_length=8)
    assert last.result is not None
    totals.add(0, last.result, 1.0)
    shown = figures(last, mini.denoiser.spec.eos_ids)
    assert re.search(r"[\d.]+ tokens per forward", shown)[0] in totals.line("cpu")  # type: ignore[index]
    assert "12/12 tokens" in shown and "12 tokens in" in totals.line("cpu")
