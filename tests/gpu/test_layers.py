"""The kernels of a layer on a CUDA device: the checks of `tests/kernels`, in more sizes.

Most of their time goes into compiling, so that by default each two values of different parameters meet.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import checks, oracles
from tests.sampling import crossed

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "size", "shared", "keys"),
    crossed(DTYPES, [64, 80, 96, 128], [(4, 4), (8, 2), (7, 1)], ["stored", "fresh", "both"], together=2),
)
def test_attention(dtype, size, shared, keys):
    heads, kv_heads = shared
    for counts in ((1,), (40, 0, 7), (150,), (2, 0, 1) * 11):
        for grid, splits, candidates in ((None, None, 1), (8, 4, 1), (8, None, 3)):
            given, options = oracles.pack(
                len(counts), dtype, counts=counts, length=200, heads=heads, kv_heads=kv_heads, size=size, grid=grid,
                splits=splits, candidates=candidates, keys=keys, longest=max(counts) * candidates,
            )  # fmt: skip
            checks.attention(given, options, "cuda")


@pytest.mark.parametrize(("dtype", "width"), crossed(DTYPES, [64, 300, 2048, 3584, 4096]))
def test_norm_and_swiglu(dtype, width):
    for flag in (False, True):
        checks.norm(width, (3, 33, width), dtype, flag, 3.0, "cuda")
        checks.swiglu(width, (3, 33, width), dtype, flag, 3.0, "cuda")


@pytest.mark.parametrize(
    ("dtype", "sizes", "norm"),
    crossed(DTYPES, [(64, 64), (80, 80), (96, 96), (128, 64), (128, 128)], [False, True], together=2),
)
def test_rope(dtype, sizes, norm):
    for slots in (False, True):
        checks.rope(0, dtype, 28, 4, *sizes, norm=norm, slots=slots, fresh=True, shaped=False, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "rows", "shape"),
    crossed(DTYPES, [1, 16, 31, 64, 128, 200], [(45, 100), (1024, 4096), (12288, 512)], together=2),
)
def test_linear(dtype, rows, shape):
    outputs, inputs = shape
    for bias in (False, True):
        checks.linear(rows, rows, outputs, inputs, dtype, bias, "cuda")
