"""The kernels of a layer on a CUDA device: the checks of `tests/kernels`, in more sizes."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import checks, oracles

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("keys", ["stored", "fresh", "both"])
def test_attention(dtype, size, heads, kv_heads, keys):
    for counts in ((1,), (40, 0, 7), (150,), (2, 0, 1) * 11):
        for grid, splits, candidates in ((None, None, 1), (8, 4, 1), (8, None, 3)):
            given, options = oracles.pack(
                len(counts), dtype, counts=counts, length=200, heads=heads, kv_heads=kv_heads, size=size, grid=grid,
                splits=splits, candidates=candidates, keys=keys, longest=max(counts) * candidates,
            )  # fmt: skip
            checks.attention(given, options, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 300, 2048, 3584, 4096])
def test_norm_and_swiglu(dtype, width):
    for flag in (False, True):
        checks.norm(width, (3, 33, width), dtype, flag, 3.0, "cuda")
        checks.swiglu(width, (3, 33, width), dtype, flag, 3.0, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (96, 96), (128, 64), (128, 128)])
@pytest.mark.parametrize("given", [(True, False), (False, True)])
def test_rope(dtype, sizes, given):
    bias, norm = given
    for slots in (False, True):
        checks.rope(0, dtype, 28, 4, *sizes, bias=bias, norm=norm, slots=slots, fresh=True, shaped=False, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 31, 64, 128, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(45, 100), (1024, 4096), (12288, 512)])
def test_linear(dtype, rows, outputs, inputs):
    for bias in (False, True):
        checks.linear(rows, rows, outputs, inputs, dtype, bias, "cuda")
