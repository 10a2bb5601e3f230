"""The benchmark runs, and refuses to compare sides that do different work."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_smoke_measures_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measured.json"
    assert import_module("step_overhead").main(["--smoke", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    kinds = {(row["batch"], row["cache"], row["kind"]) for row in found["rows"]}
    assert kinds == {(b, c, k) for b in (1, 2) for c in ("none", "dual") for k in ("overhead", "speed")}
    assert all(ratio > 0 for row in found["rows"] for ratio in row["ratios"])
    assert found["about"]["torch"] == torch.__version__
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_both_sides_give_the_same_tokens(cache: str) -> None:
    bench, official = import_module("step_overhead"), import_module("official_style")
    it = bench.subject("smoke")
    prompts = it.prompts(3)
    result = it.sampler(cache, 8).generate(prompts, max_new_tokens=it.new_tokens)
    tokens, forwards = official.generate(it.network, prompts, it.new_tokens, it.block, 8, 1, dual=cache == "dual")
    assert torch.equal(result.tokens, tokens)
    assert result.nfe.tolist() == [forwards] * 3 == [8] * 3


def test_different_tokens_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, official = import_module("step_overhead"), import_module("official_style")
    generate = official.generate

    def other(*args: object, **options: object) -> tuple[torch.Tensor, int]:
        tokens, forwards = generate(*args, **options)
        return tokens.flip(1), forwards

    monkeypatch.setattr(official, "generate", other)
    with pytest.raises(SystemExit, match="sides differ in"):
        bench.main(["--smoke", "--kinds", "speed"])


def test_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("recording").main(["--models", "smoke", "--batch", "1", "--steps", "2", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "bytes per column: 20, with the entropy 24" in printed
    assert "smoke, batch 1, trace and entropy" in printed
