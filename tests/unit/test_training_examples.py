"""The examples for training: each runs, and what it saves answers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dllm_sampler import Sampler, config
from tests import tiny
from tests.eval.test_journeys import blocks, first

FOLDER = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # of what is deprecated in transformers, but not yet in TRL


@pytest.mark.parametrize(
    "name",
    [
        "train_sft",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_deer", "train_distill", "train_grpo")),
    ],
)
def test_a_trainer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = "mini" if name == "train_grpo" else str(tiny.write("llada", tmp_path / "m"))
    words = ["--model", model, "--steps", "2", "--output", str(tmp_path / "run")]
    words += [] if name == "train_grpo" else ["--data", str(FOLDER / "facts.jsonl")]
    words += ["--target", str(tiny.target_of(Path(model)))] if name == "train_deer" else []
    assert import_module(name).main(words) >= (name != "train_deer") * 1e-9
    assert Sampler.from_pretrained(str(tmp_path / "run"), device="cpu").generate("Ada", max_new_tokens=8).texts


@pytest.mark.slow
def test_a_filter_and_mini(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of a model, and a model from scratch."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    few = ["--steps", "2", "--output"]
    filter = import_module("train_filter")
    monkeypatch.setattr(filter, "PROMPTS", ["copy : Ada", "copy : Ben"])
    given = ["--model", str(checkpoint), "--block", "4", *few, str(tmp_path / "filter")]
    assert 0 < filter.main(given) <= 4 and (tmp_path / "filter" / "filter.safetensors").is_file()
    assert isinstance(import_module("train_mini").main([*few, str(tmp_path / "mini")]), str)


def test_a_loop_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts, and the step of the page, in plain torch."""
    monkeypatch.syspath_prepend(FOLDER)
    assert 0 < import_module("rollouts").main(["--steps", "1", "--group", "2"]) <= 1
    names: dict[str, Any] = {}
    exec(first(blocks("training.md", "## A loop of your own"), "python", "MaskedLoss"), names)
    assert float(names["value"]) > 0 and all(weight.grad is not None for weight in names["model"].parameters())


@pytest.mark.slow
def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps on mini; TRL scores a token by the prediction for it when the whole answer is masked."""
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(FOLDER)
    trl_grpo = import_module("trl_grpo")
    denoiser: Any = Sampler.from_pretrained("mini", dtype="float32", device="cpu").denoiser
    policy = trl_grpo.Policy(denoiser.transformer, denoiser.mask_id)
    ids, there = (
        torch.tensor([[0, 0, 5, 6, 7, 8], [9, 3, 5, 6, 7, 0]]),
        torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 5 + [0]]),
    )
    policy.masked.width = 4
    logits = policy(ids, there).logits
    for row, (begin, last) in enumerate(((2, 6), (0, 5))):
        seen = ids[row, begin:last].masked_fill(torch.arange(begin, last) >= 4, denoiser.mask_id)
        torch.testing.assert_close(logits[row, 3 : last - 1], denoiser.transformer(seen[None])[0, 4 - begin :])

    assert 0 < trl_grpo.main(["--steps", "2", "--group", "4", "--output", str(tmp_path / "run")]) <= 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 2  reward 0.")
    before = load_file(Path(str(config.model("mini")["path"])) / "model.safetensors")
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)
    assert Sampler.from_pretrained(str(tmp_path / "run"), device="cpu").generate("copy: Ada", max_new_tokens=8).texts
