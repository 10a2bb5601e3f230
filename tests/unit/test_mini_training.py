"""The trainer of `mini`: a resumed run is the uninterrupted one, and mistakes get one sentence."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dllm_sampler import config
from dllm_sampler.models import loading
from dllm_sampler.models.mini_tokenizer import build_tokenizer
from dllm_sampler.training import cli
from dllm_sampler.training.data import Batch, Pools, corrupt
from dllm_sampler.training.mini import MiniTrainer, schedule
from tests.refusals import refused
from tests.sampling import each

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}


def words(output: Path, *more: str) -> list[str]:
    small = [f"train.model.{key}={value}" for key, value in SHAPE.items()]
    few = ["train.data.size=60", "train.data.batch_tokens=200", "train.steps=30", "train.checkpoint_every=7"]
    return ["train=mini", f"train.output={output}", "train.device=cpu", *small, *few, *more]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the middle of a step."""
    plain = MiniTrainer._loss

    def loss(self: MiniTrainer, batch: Batch, masked: Tensor, weight: Tensor) -> Tensor:
        if losses_seen.append(0) or len(losses_seen) == step:
            signal.raise_signal(signal.SIGINT)
        return plain(self, batch, masked, weight)

    losses_seen: list[int] = []
    monkeypatch.setattr(MiniTrainer, "_loss", loss)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        interrupt_at(11, patch)
        assert cli.main(words(tmp_path / "parts")) == 130
    assert (tmp_path / "parts/checkpoint.safetensors").exists()
    assert cli.main(words(tmp_path / "parts")) == 0
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not (tmp_path / "parts/checkpoint.safetensors").exists()
    losses = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("step 21/", "step 28/"))]
    assert [line.split("tokens")[0] for line in losses[:2]] == [line.split("tokens")[0] for line in losses[2:]]


@pytest.mark.slow
def test_the_export_loads_and_a_finished_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(tmp_path / "run")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run'}\n"
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "config.json", "generation_config.json", "log.jsonl", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    weights = load_file(tmp_path / "run/model.safetensors")
    assert all(tensor.dtype == torch.float16 for tensor in weights.values())
    assert "model.transformer.blocks.0.attn_norm.weight" in weights
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        assert (
            kind.from_pretrained(tmp_path / "run")("copy: Ada").input_ids == build_tokenizer(256)("copy: Ada").input_ids
        )
    assert (
        loading.load(tmp_path / "run").denoiser.spec.mask_id
        == json.loads((tmp_path / "run/config.json").read_text())["mask_token_id"]
    )
    before = (tmp_path / "run/model.safetensors").stat()
    assert cli.main(words(tmp_path / "run")) == 2
    assert "has a finished model" in capsys.readouterr().err
    assert (tmp_path / "run/model.safetensors").stat() == before


def test_an_unfinished_run_is_not_mixed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        assert cli.main(words(tmp_path / "run")) == 130
    assert cli.main(words(tmp_path / "run", "train.learning_rate=0.5")) == 2
    assert "another train.learning_rate (0.0012, not 0.5)" in capsys.readouterr().err
    (tmp_path / "run/checkpoint.safetensors").write_bytes(b"nothing of the kind")
    assert cli.main(words(tmp_path / "run")) == 2
    assert "damaged" in capsys.readouterr().err


@each(
    ("given", "sentence"),
    [
        ([], "Set train to one of cjgrpo, deer, distill, filter, grpo, mini"),
        (["train=mimi"], "did you mean 'mini'"),
        (["train=mini", "train.stepz=3"], "did you mean 'steps'"),
        (["train=mini", "train.data.sizes=3"], "did you mean 'size'"),
        (["train=mini", "train.data.phases.0.cpy=3"], "did you mean 'copy'"),
        (["train=mini", "train.steps=few"], "steps should be a valid integer"),
        (["train=mini", "train.steps=0"], "train.steps must be at least 1"),
        (["train=mini", "+train.model.wings=2"], "unknown field of train.model 'wings'"),
        (["train=mini", "+train.data.phases.0.fly=2"], "unknown task 'fly'"),
        (["train=mini", "train.device=cuda:99"], "cuda:99"),
        (["train=mini", "quickly"], "'quickly' is not train.FIELD=VALUE"),
        (["train=mini", "steps=4"], "'steps=4' is not train.FIELD=VALUE"),
    ],
)
def test_mistakes_get_one_sentence(
    given: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dllm-train: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert "train=mini: " in page and len(page.splitlines()) < 40
    assert cli.main(["--help", "train=mini"]) == 0
    page = capsys.readouterr().out
    assert all(f"train.{field}" in page for field in MiniTrainer.__dataclass_fields__)


def pools(**changes: Any) -> Pools:
    return Pools(**{"seed": 0, **config.entry("train", "mini").settings["data"], "size": 300, **changes})


def test_batches_are_seeded_and_hold_no_padding() -> None:
    tokenizer = build_tokenizer(256)
    first, again, other = (pools().batches(tokenizer, pool) for pool in (0, 0, 1))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].ids, other[0].ids)
    assert sum(len(batch.ids) for batch in first) == 300
    for batch in first:
        assert batch.ids.numel() <= 640 + batch.ids.shape[1]
        ends = batch.ids.eq(tokenizer.get_vocab()["[EOS]"])
        assert torch.equal(ends, ends.cummax(1).values)  # end tokens only at the end


def test_corruption_masks_responses_alone_and_weighs_them_fairly() -> None:
    batch = max(pools().batches(build_tokenizer(256), 0), key=lambda batch: len(batch.ids))
    total = batch.ids.shape[1]
    sums = torch.zeros(())
    for seed in range(200):
        masked, weight = corrupt(batch, torch.Generator().manual_seed(seed))
        assert not masked[torch.arange(total) < batch.prompts[:, None]].any()
        assert masked.any(1).all()
        sums += (masked * weight).sum()
    responses = (total - batch.prompts).sum()
    torch.testing.assert_close(sums / 200, responses.float(), rtol=1e-4, atol=0)


def test_learning_rate_warms_up_and_falls_at_the_end() -> None:
    rates = [schedule(step, 1000, 100, 0.5) for step in (0, 50, 100, 499, 750, 1000)]
    assert rates == pytest.approx([0.01, 0.51, 1, 1, 0.5, 0])


def test_the_trainer_can_be_used_from_python(tmp_path: Path) -> None:
    trainer = cli.trainer(words(tmp_path / "a, b [c]"))
    assert trainer.output == f"{tmp_path}/a, b [c]"
    with refused("option-range: train.checkpoint_every"):
        cli.trainer(words(tmp_path, "train.checkpoint_every=0"))
