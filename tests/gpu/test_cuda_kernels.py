"""The kernels on a GPU: the interpreter's checks, at real sizes too."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")

from dllm_sampler.core.statistics import tempered  # noqa: E402
from dllm_sampler.kernels import head, readout, reference  # noqa: E402
from dllm_sampler.kernels.backend import select  # noqa: E402
from dllm_sampler.kernels.sampling import Sampling  # noqa: E402
from tests.kernels import readout_checks as checks  # noqa: E402
from tests.sampling import crossed  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READOUT = {"triton": readout.readout, "torch": reference.readout}


@pytest.mark.parametrize(
    ("kernel", "dtype", "size"), crossed(READOUT, DTYPES, [(1, 2), (3, 45), (5, 5000), (1100, 4099)], together=2)
)
def test_readout_against_float64(kernel: Any, dtype: torch.dtype, size: tuple[int, int]) -> None:
    rows, vocab = size
    checks.readout_against_float64(kernel, "cuda", dtype, rows, vocab)


@pytest.mark.parametrize("vocab", [126464, 262144])
def test_readout_of_a_large_vocabulary(vocab: int) -> None:
    checks.readout_against_float64(readout.readout, "cuda", torch.bfloat16, 6, vocab)


@pytest.mark.parametrize(("kernel", "dtype", "temperature"), crossed(READOUT, DTYPES, [0.0, 0.6, 2.0], together=2))
def test_as_the_sampler_reads(kernel: Any, dtype: torch.dtype, temperature: float) -> None:
    checks.like_the_sampler(kernel, "cuda", dtype, temperature)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_temperature_divides_as_on_a_cpu(dtype: torch.dtype) -> None:
    logits = (torch.randn(2**16, generator=checks.seeded(0)) * 9).to(dtype)
    for value in (0.3, 0.7, 1.3):
        assert torch.equal(tempered(logits.to("cuda"), value).cpu(), logits.float() / value)


@pytest.mark.parametrize(("kernel", "vocab"), crossed(READOUT, [50, 8192, 9000], together=2))
def test_rows_that_are_not_finite(kernel: Any, vocab: int) -> None:
    checks.rows_that_are_not_finite(kernel, "cuda", vocab)


def test_close_to_one() -> None:
    checks.close_to_one(readout.readout, "cuda", exact_entropy=True)


@pytest.mark.parametrize(
    ("dtype", "size"),
    crossed(DTYPES, [(7, 300, 70), (70, 1000, 128), (33, 126464, 64), (300, 1000, 70), (2500, 1000, 256)]),
)
def test_head_against_float64(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    rows, vocab, width = size
    checks.head_against_float64(head.head, "cuda", dtype, rows, vocab, width)


def test_nothing_waits_for_the_device() -> None:
    logits = torch.randn(4, 1000, device="cuda")
    keys = checks.keys_of(4).cuda()
    it = select("auto", logits.device, logits.dtype)
    assert it.name == "triton"
    torch.cuda.set_sync_debug_mode("error")
    try:
        it.readout(logits, Sampling(temperature=1.0, keys=keys))
        it.head(logits, logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
