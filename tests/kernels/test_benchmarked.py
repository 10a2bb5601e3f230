"""Kernels that only benchmarks launch: reading, and the product of `linear` with weights that are not integers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.parametrize("count", [1, 64, 1000])
def test_every_number_is_read(count, monkeypatch):
    reading = import_module("reading")
    monkeypatch.setattr(reading, "BLOCK", 64)
    source = torch.randint(-(2**31), 0, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for place in (0, count // 2, count - 1):
        marked = source.clone()
        marked[place] = 5
        assert reading.largest(marked, 3).max() == 5
    assert reading.largest(source, 3).max() == source.max()


def test_products_in_any_tile():
    products = import_module("products")
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 300, generator=source), torch.randn(45, 300, generator=source)
    expected = F.linear(x.double(), weight.double())
    for tile in (None, (16, 32, 2, 4), (32, 64, 2, 4)):
        found = products.kernel(x, weight) if tile is None else products.tiled(tile, x, weight)
        assert torch.allclose(found.double(), expected, rtol=0, atol=1e-3), tile
