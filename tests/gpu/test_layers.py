"""The kernels of a layer on a CUDA device: the checks of `tests/kernels`, in more sizes."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import checks, oracles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("splits", [None, 4])
def test_attention(dtype, size, heads, kv_heads, splits):
    for width in (1, 40) if splits else (1, 8, 40):
        for grid, fresh in ((None, True), (None, False), (8, True), (8, False)):
            given, options = oracles.case(
                width, dtype, width=width, length=200, heads=heads, kv_heads=kv_heads, size=size, grid=grid,
                splits=splits, fresh=fresh,
            )  # fmt: skip
            checks.attention(given if fresh else (given[0], None, None, *given[3:]), options, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_and_masks(dtype):
    many, width = 3, 8
    given, options = oracles.case(0, dtype, width=width, copies=many, size=64, length=100, grid=8)
    branch = torch.arange(many * width) // width
    checks.attention(given, options | {"tree": (branch[:, None] == branch)[None]}, "cuda")
    given, options = oracles.case(1, dtype, width=width, share=many, size=64, length=100)
    mask = torch.rand(2, width, 101) < 0.5
    checks.attention(given, options | {"mask": mask, "splits": 3}, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("keys", ["stored", "fresh", "both"])
def test_packed_attention(dtype, size, heads, kv_heads, keys):
    for counts in ((1,), (40, 0, 7), (150,), (2, 0, 1) * 11):
        for grid, splits, candidates in ((None, None, 1), (8, 4, 1), (None, 3, 3), (8, None, 2)):
            given, options = oracles.pack(
                len(counts), dtype, counts=counts, length=200, heads=heads, kv_heads=kv_heads, size=size, grid=grid,
                splits=splits, candidates=candidates, keys=keys, longest=max(counts) * candidates,
            )  # fmt: skip
            checks.pack(given, options, "cuda")


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
        checks.rope(0, dtype, 28, 4, *sizes, bias=bias, norm=norm, slots=slots, fresh=True, shared=False, device="cuda")
        checks.packed_rope(
            0, dtype, 28, 4, *sizes, bias=bias, norm=norm, slots=slots, fresh=True, shaped=False, device="cuda"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 31, 64, 128, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(45, 100), (1024, 4096), (12288, 512)])
def test_linear(dtype, rows, outputs, inputs):
    for bias in (False, True):
        checks.linear(rows, rows, outputs, inputs, dtype, bias, "cuda")
