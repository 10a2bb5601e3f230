"""The trainer of `mini`: a resumed run is the uninterrupted one, and mistakes get one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dllm_sampler import config
from dllm_sampler.models import loading
from dllm_sampler.models.mini_pools import Pools
from dllm_sampler.models.mini_tokenizer import build_tokenizer
from dllm_sampler.training import cli, mini
from dllm_sampler.training.mini import corrupt
from tests.refusals import refused
from tests.sampling import each

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}


def words(output: Path, *more: str) -> list[str]:
    small = [f"train.model.{key}={value}" for key, value in SHAPE.items()]
    few = ["data.size=60", "data.batch_tokens=200", "max_steps=12", "save_steps=5", "logging_steps=1", "use_cpu=true"]
    return ["train=mini", f"train.output_dir={output}", *small, *(f"train.{one}" for one in few), *more]


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [line["loss"] for line in state["log_history"] if "loss" in line]


def test_a_run_that_resumes_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(tmp_path / "whole")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'whole'}\n"
    plain, calls = mini.corrupt, list[int]()

    def killed(*given: Any) -> Any:
        if calls.append(0) or len(calls) == 9:
            raise KeyboardInterrupt
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(mini, "corrupt", killed)
        assert cli.main(words(tmp_path / "parts")) == 130
    assert cli.main(words(tmp_path / "parts")) == 2
    assert "has an unfinished run" in capsys.readouterr().err
    assert cli.main(words(tmp_path / "parts", "train.resume=true")) == 0
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and len(losses(tmp_path / "whole")) == 12
    assert all(tensor.dtype == torch.float16 for tensor in whole.values())
    assert "model.transformer.blocks.0.attn_norm.weight" in whole
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        ids = kind.from_pretrained(tmp_path / "whole")("copy: Ada").input_ids
        assert ids == build_tokenizer(256)("copy: Ada").input_ids
    mask = json.loads((tmp_path / "whole" / "config.json").read_text())["mask_token_id"]
    assert loading.load(tmp_path / "whole").denoiser.spec.mask_id == mask
    assert cli.main(words(tmp_path / "whole")) == 2
    assert "has a finished run" in capsys.readouterr().err


@each(
    ("given", "sentence"),
    [
        ([], "Set train to one of cjgrpo, deer, distill, filter, grpo, mini"),
        (["train=mimi"], "Did you mean 'mini'"),
        (["train=mini", "train.max_stepz=3"], "Did you mean 'max_steps'"),
        (["train=mini", "train.data.sizes=3"], "Did you mean 'size'"),
        (["train=mini", "train.data.phases.0.cpy=3"], "Did you mean 'copy'"),
        (["train=mini", "train.max_steps=few"], "max_steps='few' is invalid. Set a whole number"),
        (["train=mini", "train.data.size=0"], "train.data.size=0 is invalid. Set a whole number of at least 1"),
        (["train=mini", "train.data.long=1.5"], "train.data.long=1.5 is invalid. Set a share"),
        (
            ["train=mini", "train.data.tails=[0, 0]"],
            "train.data.tails=[0, 0] is invalid. Give numbers of at least 0",
        ),
        (["train=mini", "train.model.num_layers=-1"], "train.model.num_layers=-1"),
        (["train=mini", "train.model.num_layers=x"], "num_layers='x' is invalid. Set a whole number"),
        (["train=mini", "train.model.head_dim=7"], "head_dim=7 is invalid. Set a multiple of 2."),
        (["train=mini", "train.model.num_heads=3", "train.model.num_kv_heads=2"], "Set a multiple of 2 (num_kv_heads)"),
        (["train=mini", "train.init_std=-1"], "init_std=-1 is invalid. Set a number greater than or equal to 0"),
        (["train=mini", "train.output_dir=null"], "train.output_dir=null is invalid. Name a folder"),
        (["train=mini", "train.output_dir="], "train.output_dir"),
        (["train=mini", "+train.model.wings=2"], "train.model has no field 'wings'"),
        (["train=mini", "+train.data.phases.0.fly=2"], "unknown task of train.data.phases.0 'fly'"),
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


def test_settings_of_the_learning_rate_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(tmp_path / "run", "train.lr_scheduler_kwargs.min_lr_ratio=")) == 2
    err = capsys.readouterr().err
    assert err.startswith("dllm-train: train.lr_scheduler_kwargs={") and "min_lr_ratio: ''}" in err


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert "train=mini: " in page and len(page.splitlines()) < 40
    assert cli.main(["--help", "train=mini"]) == 0
    page = capsys.readouterr().out
    assert all(f"train.{field}" in page for field in config.entry("train", "mini").settings if field != "_target_")


def pools(**changes: Any) -> Pools:
    return Pools(**{"seed": 0, **config.entry("train", "mini").settings["data"], "size": 300, **changes})


def test_phases_begin_with_0() -> None:
    for phases in ({}, {"3": {"copy": 1}}, {"0": {"copy": 1}, "9": {"copy": 1}, "3": {"copy": 1}}):
        with refused("option-range: train.data.phases"):
            pools(phases=phases)


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


def test_it_runs_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train=mini", f"train.output_dir={tmp_path / 'run'}"]) == 2
    assert "train=mini runs in one process" in capsys.readouterr().err


def test_a_path_is_taken_to_the_letter(tmp_path: Path) -> None:
    assert cli.read(words(tmp_path / "a, b [c]")).settings["output_dir"] == f"{tmp_path}/a, b [c]"
