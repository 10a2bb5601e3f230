"""The gated product against torch's rounding and against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.kernels.swiglu import swiglu
from tests.kernels import checks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(
    seed=st.integers(0, 10**6), width=st.sampled_from([1, 9, 1024, 1500]), rows=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES), fused=st.booleans(), factor=st.sampled_from([0.0, 1.0, 40.0]),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_as_in_float64(seed, width, rows, dtype, fused, factor):
    checks.swiglu(seed, (2, rows, width), dtype, fused, factor)


def test_rounds_where_torch_does():
    gate, up = torch.randn(2, 8, 2000).half() * 4
    apart = swiglu(gate, up).float() - torch.nn.functional.silu(gate).float() * up.float()
    assert apart.abs().max() <= torch.finfo(torch.float16).eps / 2 * up.abs().max() * gate.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype):
    big = torch.finfo(dtype).max
    gate = torch.tensor([-big, -100.0, 0.0, 100.0, big], dtype=dtype)
    got = swiglu(gate, torch.ones_like(gate))
    assert got.isfinite().all() and (got[:3] == 0).all() and (got[3:] > 99).all()


def test_no_rows():
    assert swiglu(torch.empty(0, 8)).shape == (0, 4)
