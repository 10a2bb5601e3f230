"""Numbers with which nothing can be trained are refused before anything runs."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import UserError
from dllm_sampler.training.cli import main, trainer
from dllm_sampler.training.data import Pools
from dllm_sampler.training.settings import check_settings, check_shape
from tests.sampling import sampled


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learning_rate", -1, "a number above 0"),
        ("learning_rate", float("nan"), "a number above 0"),
        ("clip", 0, "a number above 0"),
        ("weight_decay", float("inf"), "a number of at least 0"),
        ("init_std", float("nan"), "a number of at least 0"),
        ("embedding_std", -0.5, "a number of at least 0"),
        ("decay", 2, "a share between 0 and 1"),
        ("warmup", -1, "a whole number of at least 0"),
        ("betas", (0.9, 1.0), "two numbers from 0 to below 1"),
        ("steps", 99999999999, "a whole number up to 4294967295"),
        ("seed", -99999999999, "a whole number up to 2147483647"),
    ],
)
def test_numbers_of_an_optimizer(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.{name} must be {said}"):
        check_settings({name: value})


@pytest.mark.parametrize("train", ["mini", "filter", "distill", "deer", "grpo", "cjgrpo"])
def test_every_trainer_checks_its_numbers(train: str) -> None:
    with pytest.raises(UserError, match=r"train\.seed must be a whole number up to"):
        trainer([f"train={train}", "train.seed=99999999999"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train=sft", "train.evaluation={foo: 1}"], r"unknown field of train\.evaluation 'foo': the fields are"),
        (
            ["train=sft", "train.evaluation={block_length: 8}"],
            r"unknown field of train\.evaluation 'block_length': the",
        ),
        (["train=cjgrpo", "train.rollout={seed: 1, temperature: 1.0}"], r"unknown field of train\.rollout 'seed'"),
        (["train=distill", "train.teacher={model: mini}"], r"unknown field of train\.teacher 'model'"),
        (["train=sft", "train.tasks={copy: 0}"], r"train\.tasks has no share above 0"),
        (["train=cjgrpo", "train.tasks={sudoku: -1, copy: 2}"], r"train\.tasks\.sudoku must be a share of at least 0"),
        (["train=sft", "train.lora={r: 1.5, alpha: 2, dropout: 0}"], r"train\.lora\.r must be a whole number"),
        (["train=sft", "train.lora={r: 0, alpha: 2, dropout: 0}"], r"train\.lora\.r must be a whole number"),
        (["train=deer", "train.lora={r: 2, alpha: 0, dropout: 0}"], r"train\.lora\.alpha must be a number above 0"),
        (["train=sft", "train.lora={r: 2, alpha: 2, dropout: 1}"], r"train\.lora\.dropout must be from 0 to below 1"),
        (["train=deer", "train.lora={r: 2, alpha: 2, dropout: -1}"], r"train\.lora\.dropout must be from 0"),
        (
            ["train=deer", "train.shape={hidden_size: 7}"],
            r"train\.shape needs .*intermediate_size is missing",
        ),
        (["train=deer", "train.shape.hidden_size=7"], r"train\.shape\.hidden_size must be a multiple of num_attention"),
        (["train=deer", "train.shape.num_hidden_layers=0"], r"train\.shape\.num_hidden_layers must be a whole number"),
        (["train=mini", "train.output="], r"train\.output is empty: it should be a path"),
        (["train=mini", "train.output=null"], "train=mini: output should be a valid string, not None"),
    ],
)
def test_settings_are_checked_before_anything_runs(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        trainer(words)


@pytest.mark.parametrize("size", sampled(["''", "x", "[1]", "{a: 1}"]))
def test_a_size_of_a_model_that_is_no_number(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of threads depends on the sizes, and is chosen before the trainer looks at them."""
    for name in ("hidden_size", "num_layers", "intermediate_size"):
        assert main(["train=mini", f"train.output={tmp_path}/t", "train.device=cpu", f"train.model.{name}={size}"]) == 2
        assert f"dllm-train: train.model: {name} should be a valid integer" in capsys.readouterr().err


def test_a_file_without_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = (files("dllm_sampler.conf") / "train/sft.yaml").read_text()
    (tmp_path / "conf/train").mkdir(parents=True)
    (tmp_path / "conf/train/own.yaml").write_text(re.sub("(?m)^lora:.*\n", "", whole))
    with pytest.raises(UserError, match=r"^train=own: the field lora is missing$"):
        trainer(["train=own"])


@pytest.mark.parametrize(
    ("train", "file"),
    [("mini", "model.safetensors"), ("grpo", "model.safetensors"), ("deer", "report.json"), ("filter", "")],
)
def test_the_home_folder_is_meant_by_its_sign(
    train: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a command line the shell does not replace it behind `=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / file).touch()
    with pytest.raises(UserError, match=rf"{tmp_path}/m already "):
        trainer([f"train={train}", "train.output=~/m"]).run()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("size", 0, "size must be a whole number of at least 1"),
        ("batch_tokens", -1, "batch_tokens must be"),
        ("long", 1.5, "long must be a share"),
        ("tails", (0.0, 0.0), "tails must be numbers of at least 0, one of them above"),
        ("tails", (float("nan"),), "tails"),
        ("phases", {}, "must begin with the pool 0"),
        ("phases", {"3": {"copy": 1}}, "must begin with the pool 0"),
        ("phases", {"0": {"copy": -1}}, r"phases\.0 must be numbers"),
    ],
)
def test_numbers_of_the_data(field: str, value: object, said: str) -> None:
    right = {
        "seed": 0, "phases": {"0": {"copy": 1}}, "size": 4, "batch_tokens": 9, "tails": (1.0,), "long": 0.1,
        "max_response": 9,
    }  # fmt: skip
    assert Pools(**right)
    with pytest.raises(UserError, match=said):
        Pools(**{**right, field: value})


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_layers": -1}, "num_layers must be a whole number of at least 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"norm_eps": float("nan")}, "norm_eps"),
    ],
)
def test_shapes_of_a_network(shape: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_shape(shape)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train=mini", "train.model.num_layers=-1", "train.device=cpu"]) == 2
    assert "train.model.num_layers must be" in capsys.readouterr().err
