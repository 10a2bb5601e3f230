"""The fused head against float64 and against a stored product."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler.kernels import head, readout, reference
from dllm_sampler.kernels.sampling import Sampling
from tests.kernels import readout_checks as checks
from tests.sampling import crossed

KERNELS = pytest.mark.parametrize("kernel", [head.head, reference.head], ids=["triton", "torch"])


DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@KERNELS
@pytest.mark.parametrize(("dtype", "size"), crossed(DTYPES, [(1, 5, 3), (7, 300, 70), (18, 130, 20)]))
def test_against_float64(kernel: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    checks.head_against_float64(kernel, "cpu", dtype, *size)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 5), (torch.bfloat16, 8)])
def test_many_rows_are_read_from_a_stored_product(dtype: torch.dtype, rows: int, monkeypatch: Any) -> None:
    """A library multiplies, some rows at a time."""
    monkeypatch.setattr(head, "MOST", 4)
    monkeypatch.setattr(head, "AT_ONCE", 4)
    monkeypatch.setattr(head, "head_kernel", None)
    checks.head_against_float64(head.head, "cpu", dtype, rows, 130, 20)


def random(rows: int, vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = checks.seeded(rows)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    return hidden, (torch.randn(vocab, width, generator=generator) / width**0.5 * 4).to(dtype)


@pytest.mark.parametrize("rows", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_tokens_are_those_of_a_stored_product(rows: int) -> None:
    hidden, weight = random(rows, 120, 96, torch.bfloat16)
    stored = hidden @ weight.T
    for temperature in (0.0, 1.0):
        sampling = Sampling(0, temperature, keys=checks.keys_of(rows))
        fused, apart = head.head(hidden, weight, sampling), readout.readout(stored, sampling)
        assert torch.equal(fused.token, apart.token)
        torch.testing.assert_close(fused.confidence, apart.confidence, rtol=0.05, atol=0.01)  # one bfloat16 place


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([-8192.0, -1.0, 0.0, 0.5, 1.0, 64.0]), min_size=3, max_size=3), min_size=1, max_size=3
    ),
    st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32),
)
def test_ties_and_extremes(rows: list, temperature: float, measured: bool, dtype: torch.dtype, seed: int) -> None:
    """Products that float32 sums exactly: what is stored is rounded once, and few numbers tie everywhere."""
    hidden = torch.tensor(rows).to(dtype)
    weight = torch.randint(-1, 2, (150, 3), generator=checks.seeded(seed)).to(dtype)
    logits = (hidden.double() @ weight.double().T).to(dtype)
    named = torch.arange(len(rows))
    sampling = Sampling(8, temperature, measured, checks.keys_of(len(rows), seed), named)
    found, expected = head.head(hidden, weight, sampling), reference.readout(logits, sampling)
    assert torch.equal(found.token, expected.token)
    logits[:, 8] = -checks.INF
    seen = logits.float() / temperature if measured and temperature else logits
    size = float(seen[seen.isfinite()].abs().max()) + 1
    checks.compare(found, checks.exact(seen, found.token, named), size)


def test_float32_keeps_all_its_digits() -> None:
    hidden, weight = random(4, 150, 200, torch.float32)
    logits = hidden.double() @ weight.double().T
    found = head.head(hidden, weight)
    assert torch.equal(found.token, logits.argmax(-1))
    checks.compare(found, checks.exact(logits, found.token, None), size=30)


@KERNELS
@pytest.mark.parametrize(
    ("rows", "dtype"), [(3, torch.float32), pytest.param(70, torch.bfloat16, marks=pytest.mark.slow)]
)
def test_rows_that_are_not_finite(kernel: Any, rows: int, dtype: torch.dtype) -> None:
    hidden, weight = random(rows, 150, 8, dtype)
    sampling = Sampling(temperature=0.5, keys=checks.keys_of(rows))
    alone = kernel(hidden, weight, sampling)
    bad = torch.arange(rows) % 50 == 1
    hidden[bad, 2] = torch.nan
    found = kernel(hidden, weight, sampling)
    for name in ("confidence", "margin", "gap", "entropy", "logsumexp"):
        got = getattr(found, name)
        assert torch.equal(got.isnan(), bad), name
        assert torch.equal(got[~bad], getattr(alone, name)[~bad]), name
    assert torch.equal(found.token[~bad], alone.token[~bad])
    assert ((found.token >= 0) & (found.token < 150)).all()


def test_no_rows() -> None:
    hidden, weight = random(3, 40, 8, torch.float32)
    assert head.head(hidden[:0], weight).token.shape == (0,)
