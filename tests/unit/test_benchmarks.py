"""The benchmark runs, and refuses to compare sides that do different work."""

import json
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler.kernels.backend import TORCH
from tests.contract.test_in_place import Taped, taped

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


def test_kernels_without_a_gpu_are_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "kernels.json"
    assert import_module("kernels").main(["--smoke", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["name"].split()[0] for row in found["rows"]} == {
        "readout", "head", "commit", "attention", "norm", "qkv_rope", "linear", "swiglu"
    }  # fmt: skip
    assert all(row["reference"] and not row["kernel"] and not row["ratios"] for row in found["rows"])
    assert found["about"]["device"].startswith("CPU")
    assert "only their torch references" in capsys.readouterr().out


def test_a_decoding_step_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    bench = import_module("decode_step")
    assert bench.main(["--smoke", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"readout", "generate", "window", "refresh"}
    assert {(row["batch"], row["window"]) for row in rows if row["kind"] == "window"} == {(1, 8), (1, 4), (2, 8)}
    assert all(row["seconds"] and row["side"] == "torch" for row in rows)
    assert all(row["floor"] > 0 for row in rows if row["kind"] != "generate")
    assert next(row["note"] for row in rows if row["plain"]) == "16 tokens, 0 of them differ from the plain loop's"
    assert "nothing about a GPU was measured" in capsys.readouterr().out


def test_a_decoding_step_of_a_large_model_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        import_module("decode_step").main([])


def test_branches_are_timed_in_both_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "branches.json"
    options = ["--model", "smoke", "--branches", "1,4", "--repeats", "1", "--json", str(file)]
    assert import_module("branches").main(options) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["branches"], row["layout"]) for row in rows] == [(1, "batch"), (4, "batch"), (4, "tree")]
    assert rows[0]["positions"] < rows[1]["positions"] and all(row["seconds"] for row in rows)
    assert "over one branch" in capsys.readouterr().out


PUBLISHED = """
import torch

def generate(model, prompt, attention_mask=None, steps=128, gen_length=128, block_length=128, temperature=0.0,
             cfg_scale=0.0, remasking="low_confidence", mask_id=126336):
    ids = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], 1).to(model.device)
    for end in range(prompt.shape[1] + block_length, ids.shape[1] + 1, block_length):
        for _ in range(steps // (gen_length // block_length)):
            law = model(ids, attention_mask=attention_mask).logits.double().softmax(-1)
            sure = torch.where(ids == mask_id, law.amax(-1), -1)
            sure[:, end:] = -1
            for row, at in enumerate(sure.argmax(1)):
                ids[row, at] = law[row, at].argmax()
    return ids
"""  # of the published signature; ours, not theirs


def test_beside_the_published_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "generate.py"
    file.write_text(PUBLISHED)
    words = ["--models", "smoke", "--batch", "2", "--steps", "32", "--repeats", "1", "--kinds", "speed", "--official"]
    assert import_module("step_overhead").main([*words, str(file)]) == 0
    assert "smoke batch 2 none official" in capsys.readouterr().out
    words = ["--smoke", "--batch", "1", "--windows", "8", "--json", str(tmp_path / "steps.json"), "--official"]
    assert import_module("decode_step").main([*words, str(file)]) == 0
    (row,) = (one for one in json.loads((tmp_path / "steps.json").read_text())["rows"] if one["kind"] == "official")
    assert row["plain"] and row["note"].endswith(" 0 of them differ from the published code's")
    file.write_text("")
    with pytest.raises(SystemExit, match="has no function generate"):
        import_module("official_code").load(file)


def test_the_hosts_time_between_two_replays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedulers", "threshold", "--caches", "dual", "--layers", "1", "--steps", "12"]
    assert import_module("host_gap").main(words) == 0
    assert "threshold" in capsys.readouterr().out


def test_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("recording").main(["--models", "smoke", "--batch", "1", "--steps", "2", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "bytes per column: 20, with the entropy 24" in printed
    assert "smoke, batch 1, trace and entropy" in printed


def test_a_decoding_step_that_fails_is_a_line_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, bench = tmp_path / "steps.json", import_module("decode_step")
    written: list[int] = []

    def fails(self: Any, side: str) -> Any:
        bench.select("triton", self.device, torch.float64)  # which has no kernels
        raise RuntimeError("CUDA error: out of luck\nmore of it")

    def falls(self: Any, side: str) -> Any:
        written.append(len(json.loads(file.read_text())["rows"]))
        bench.select("triton", self.device, torch.float64)
        return bench.Row("generate", side, 1, 8)

    monkeypatch.setattr(bench.Bench, "readout", fails)
    monkeypatch.setattr(bench.Bench, "generate", falls)
    monkeypatch.setattr(bench.Bench, "steps", lambda self, side, batch, window: [])
    assert bench.main(["--smoke", "--json", str(file)]) == 0
    notes = [row["note"] for row in json.loads(file.read_text())["rows"]]
    assert written == [1]
    assert notes[0].startswith("failed: RuntimeError: CUDA error: out of luck; Triton kernels cannot run here")
    assert notes[1].startswith("Triton kernels cannot run here, torch takes their place")


@pytest.mark.parametrize("side", ["graph", "int8"])
def test_what_a_recorded_model_reads_stays_alive(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording keeps nothing: what it reads would be freed, and the memory used again."""
    if side == "int8":
        pytest.importorskip("torchao")
    bench, alive = import_module("decode_step"), []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        if not isinstance(run, partial):  # a step of the engine, whose tensors have homes
            return taped(run)
        _, query, plan = run.args[0]
        read = [weakref.ref(one) for one in (query.positions, query.ids, plan.positions)]
        return lambda: alive.extend(one() is not None for one in read)

    monkeypatch.setattr(bench, "record", record)
    monkeypatch.setattr(bench, "StaticEngine", Taped)
    monkeypatch.setattr(bench, "select", lambda *_: TORCH)
    with torch.no_grad():
        rows = bench.Bench(bench.arguments(["--smoke"])).steps(side, 1, 8)
    assert [(row.kind, len(row.seconds), len(row.model)) for row in rows] == [("window", 7, 7), ("refresh", 1, 1)]
    assert alive and all(alive)
