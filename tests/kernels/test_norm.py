"""RMSNorm against torch's rounding, step by step, and against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.kernels.norm import norm, norm_reference
from dllm_sampler.models.transformer import RMSNorm
from tests.kernels import checks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(
    seed=st.integers(0, 10**6), width=st.sampled_from([1, 7, 64, 300, 1025, 3584]), rows=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES), add=st.booleans(), factor=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_as_in_float64(seed, width, rows, dtype, add, factor):
    checks.norm(seed, (2, rows, width), dtype, add, factor)


@pytest.mark.parametrize("add", [False, True])
def test_rounds_where_the_network_does(add):
    """Float16, since Triton's interpreter does not round to bfloat16."""
    hidden, delta = torch.randn(2, 3, 4, 256).half()
    module = RMSNorm(256, 1e-5).half()
    module.weight.data.normal_()
    want = module(hidden + delta if add else hidden)
    got, residual = norm(hidden, module.weight.detach(), 1e-5, delta if add else None)
    assert torch.equal(residual, hidden + delta if add else hidden)
    apart = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    # The order of the sum moves few norms by one place, which the weight's product may make two.
    assert apart.max() <= 2 and (apart > 0).float().mean() < 0.01


def test_norms_each_head_of_a_view():
    fused = torch.randn(2, 3, 8 * 64)
    heads = fused.unflatten(-1, (8, 64))[:, :, 2:5]
    weight = torch.randn(64)
    torch.testing.assert_close(norm(heads, weight, 1e-6)[0], norm_reference(heads, weight, 1e-6)[0])


def test_what_lies_beside_a_row_is_not_read():
    wide = torch.full((3, 100), torch.nan)
    wide[:, :37] = torch.randn(3, 37)
    assert norm(wide[:, :37], torch.ones(37), 1e-6)[0].isfinite().all()
    assert norm(torch.empty(0, 8), torch.ones(8), 1e-6)[0].shape == (0, 8)
