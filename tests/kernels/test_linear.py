"""The product with 8-bit weights against float64, and against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.kernels import linear as module
from dllm_sampler.kernels.linear import linear, linear_reference
from tests.kernels import checks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of these tests have several tiles, as real ones do, and last ones that are cut."""
    for name, size in {"DEEP": 64, "PROGRAMS": 4}.items():
        monkeypatch.setattr(module, name, size)


@given(
    seed=st.integers(0, 10**6), rows=st.sampled_from([1, 3, 16, 17, 40, 70]), outputs=st.sampled_from([1, 16, 45, 160]),
    inputs=st.sampled_from([1, 32, 100, 300]), dtype=st.sampled_from(DTYPES), bias=st.booleans(),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_as_in_float64(seed, rows, outputs, inputs, dtype, bias):
    checks.linear(seed, rows, outputs, inputs, dtype, bias)


def test_few_outputs_have_lower_tiles():
    assert [module.tile(32, outputs, 2)["TALL"] for outputs in (45, 160)] == [16, 32]


def test_with_many_rows_the_weight_is_unpacked(monkeypatch):
    monkeypatch.setattr(module, "MANY", 4)
    checks.linear(0, 5, 45, 100, torch.bfloat16, True)


def test_the_unpacked_weight_serves_piece_after_piece(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    checks.linear(0, 5, 45, 100, torch.bfloat16, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype):
    """A row with NaN or an infinity spoils itself alone; the largest integers are exact."""
    x = torch.full((4, 100), 1.0, dtype=dtype)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    weight = torch.full((20, 100), -127, dtype=torch.int8)
    weight[1] = 127
    got = linear(x, weight, torch.full((20,), 0.5))
    assert got[1].isnan().all()
    assert got[2, 1] == torch.inf and (got[2, [0, *range(2, 20)]] == -torch.inf).all()
    assert (got[0] == got[3]).all() and got[0, 1] == -got[0, 0] == 6350


def test_rows_do_not_depend_on_their_batch():
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 300, generator=source), torch.randint(-127, 128, (16, 300), generator=source).char()
    scale = torch.rand(16, generator=source)
    assert torch.equal(linear(x[7:8], weight, scale), linear(x, weight, scale)[7:8])


def test_half_precision_does_not_overflow():
    """Integers times activations do, before they are scaled."""
    x = torch.zeros(3, 100, dtype=torch.float16)
    x[:, 0] = 600
    weight, scale = torch.full((5, 100), 127, dtype=torch.int8), torch.full((5,), 1e-3)
    for kernel in (linear, linear_reference):
        torch.testing.assert_close(
            kernel(x, weight, scale), torch.full((3, 5), 76.2, dtype=torch.float16), rtol=2e-3, atol=0
        )


def test_whatever_the_default_dtype_is():
    x, weight, scale = torch.randn(3, 300), torch.randint(-127, 128, (16, 300), dtype=torch.int8), torch.rand(16)
    expected = linear(x, weight, scale)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = linear(x, weight, scale)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_axes_are_kept():
    x, weight, scale = torch.randn(2, 3, 32), torch.ones(5, 32, dtype=torch.int8), torch.ones(5)
    assert linear(x, weight, scale).shape == linear_reference(x, weight, scale).shape == (2, 3, 5)
    assert linear(torch.empty(0, 32), weight, scale).shape == (0, 5)
    wide = torch.randn(3, 64)
    for x in (wide[:, :32], torch.randn(32, 3).T):
        torch.testing.assert_close(linear(x, weight, scale), linear_reference(x, weight, scale))
