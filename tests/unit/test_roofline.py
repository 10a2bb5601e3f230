"""The byte and operation model against numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import roofline
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import TransformerConfig
from tests.sampling import each
from tests.tables.roofline import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_parts_by_hand():
    # 10 words, stream 4, inner 6, 3 layers, 2 heads over 1 of keys, 2 wide; 2 rows of 5 positions over 7 slots.
    model = TransformerConfig(10, 4, 6, 3, 2, 1, 2)
    work = roofline.Work(batch=2, window=5, slots=7, asked=3)
    found = {p.name: (p.bytes, p.flops) for p in roofline.parts(model, work, cache=1e9)}
    assert found == {
        "qkv": (3 * 4 * 8 * 2, 2 * 10 * 3 * 4 * 8),
        "o": (3 * 16 * 2, 2 * 10 * 3 * 16),
        "mlp": (3 * 72 * 2, 2 * 10 * 3 * 72),
        "kv read": (3 * 2 * 7 * 2 * 2 * 2, 3 * 4 * 10 * 4 * 7),
        "kv write": (3 * 10 * 2 * 2 * 2, 0),
        "activations": (10 * 4 * 2, 0),
        "head": (10 * 4 * 2, 2 * 6 * 40),
        "logits": (2 * 6 * 10 * 2, 0),
        "sampler": (2 * 7 * 11 + 6 * 20, 0),
    }
    spilled = {p.name: p.bytes for p in roofline.parts(model, work, cache=0)}
    more = {"qkv": 4 + 8, "o": 4 + 4, "mlp": 8 + 18, "kv read": 8, "activations": 32 + 16 + 18}  # per token and layer
    assert spilled == {name: known[0] + 10 * 3 * more.get(name, 0) * 2 for name, known in found.items()}


def test_weights_of_integers_by_hand():
    model = TransformerConfig(10, 4, 6, 3, 2, 1, 2)
    work = roofline.Work(batch=2, window=5, slots=7, asked=3)
    plain, found = (
        {p.name: (p.bytes, p.flops) for p in roofline.parts(model, each, cache=1e9)}
        for each in (work, replace(work, int8=True))
    )
    weights = {"qkv": 3 * (4 * 8 + 8 * 4), "o": 3 * (16 + 4 * 4), "mlp": 3 * (72 + (2 * 6 + 4) * 4)}
    assert found == plain | {name: (size, plain[name][1]) for name, size in weights.items()}


def test_experts_by_hand():
    # 4 experts, 2 per token, one dense layer of two: two tokens reach 4 (1 - 1/4) = 3 experts.
    model = TransformerConfig(10, 4, 6, 2, 2, 1, 2, moe=MoeConfig(4, 2, 5, frozenset([1]), 3))
    every = 3 * 4 * 3 + 4 * 4
    mlp = roofline.parts(model, roofline.Work(batch=1, window=2), cache=1e9)[2]
    assert mlp.bytes == (72 + 3 * 60 + every) * 2
    assert mlp.flops == 2 * 2 * (72 + 2 * 60 + every)


def test_llada_8b_on_an_h200():
    """15.0 GB of weights and 0.54 GB of stored keys and values over the 4.3 TB/s that a copy reaches there."""
    gpu = replace(roofline.GPUS["h200"], bandwidth=4.3e12)
    model, work = roofline.MODELS["llada-8b"], roofline.Work()
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 126464 * 4096
    assert weights * 2 / 4.3e12 == pytest.approx(3.487e-3, rel=1e-3)
    assert roofline.floor(model, gpu, work) == pytest.approx(3.62e-3, rel=0.01)
    assert all(p.bound(gpu) == "memory" for p in roofline.parts(model, work, gpu.cache))
    body = weights - 126464 * 4096
    flops = 1024 * (2 * body + 32 * 4 * 4096 * 1024) + 2 * 32 * 126464 * 4096
    assert roofline.refresh(model, gpu, work) == pytest.approx(flops / gpu.peak, rel=0.1)


def test_floors_by_both_bandwidths(capsys: pytest.CaptureFixture[str]):
    """As docs/kernels.md quotes them: 3.24 ms where memory is read at 4.8 TB/s, 3.62 at a copy's 4.3."""
    words = ["--models", "llada-8b", "--gpus", "h200", "--batch", "1", "--windows", "32", "--fused-head"]
    assert main([*words, "--bandwidth", "4.8", "--copy", "4.3"]) == 0
    assert "3.24 / 3.62" in capsys.readouterr().out


def test_free_positions_are_where_the_floor_bends():
    model, gpu, work = roofline.MODELS["llada-8b"], roofline.GPUS["h200"], roofline.Work()
    edge = roofline.free(model, gpu, work)
    first = roofline.floor(model, gpu, replace(work, window=1))
    assert roofline.floor(model, gpu, replace(work, window=edge)) <= 1.1 * first
    assert roofline.floor(model, gpu, replace(work, window=edge + 1)) > 1.1 * first
    assert edge == pytest.approx(gpu.peak / gpu.bandwidth, rel=0.2)  # the ridge of a weight in bfloat16


def test_it_writes_json_and_fills_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "roofline.md").read_text())
    words = ["--models", "llada-8b", "--gpus", "h200", "--batch", "1,2", "--windows", "8,32", "--parts", "--json"]
    assert main([*words, str(tmp_path / "a.json"), "--docs", str(page)]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert {(f["work"]["batch"], f["work"]["window"]) for f in found} == {(b, w) for b in (1, 2) for w in (8, 32)}
    assert found[0]["seconds"] == roofline.floor(
        roofline.MODELS["llada-8b"], roofline.GPUS["h200"], roofline.Work(1, 8)
    )
    assert "H200" in capsys.readouterr().out and (tmp_path / "page.png").stat().st_size > 1000
    assert "| llada-8b | 1 | 3.24 |" in page.read_text()


@each(
    ("given", "said"),
    [
        (["--gpus", "h300"], "unknown GPU 'h300'. Did you mean 'h200' or 'h100'"),
        (["--models", "lada-8b"], "unknown model 'lada-8b'. Did you mean 'llada-8b'"),
        (["--bandwidth", "4"], "of one GPU, not of h200,a100"),
        (["--gpus", "h200", "--bandwidth", "-3"], "--bandwidth: should be a number above 0, not '-3'"),
        (["--gpus", "h200", "--peak", "inf"], "--peak: should be a number above 0, not 'inf'"),
        (["--slots", "0"], "--slots: should be a whole number from 1 to 2147483647, not '0'"),
        (["--windows", "8,0"], "--windows: each should be a whole number from 1 to 2147483647, not '0'"),
        (["--int8", "--models", "llada2-mini"], "for dense models, not for llada2-mini"),
        (["--json", "nowhere/a.json"], "the folder nowhere does not exist"),
        (["--docs", "pyproject.toml"], "pyproject.toml has no place for the results"),
    ],
)
def test_wrong_options_are_said(given, said, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("python -m tests.tables.roofline: ") and error.count("\n") == 1
