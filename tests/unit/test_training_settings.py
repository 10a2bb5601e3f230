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
from tests.refusals import refused
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
    with refused(f"option-range: train.{name}, {said}"):
        check_settings({name: value})


@pytest.mark.parametrize("train", ["mini", "filter", "distill", "deer", "grpo", "cjgrpo"])
def test_every_trainer_checks_its_numbers(train: str) -> None:
    with refused("option-range: train.seed"):
        trainer([f"train={train}", "train.seed=99999999999"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train=sft", "train.evaluation={foo: 1}"], "field-unknown: train.evaluation, 'foo'"),
        (
            ["train=sft", "train.evaluation={block_length: 8}"],
            "field-unknown: train.evaluation, 'block_length'",
        ),
        (["train=cjgrpo", "train.rollout={seed: 1, temperature: 1.0}"], "field-unknown: train.rollout, 'seed'"),
        (["train=distill", "train.teacher={model: mini}"], "field-unknown: train.teacher, 'model'"),
        (["train=sft", "train.tasks={copy: 0}"], "option-range: train.tasks"),
        (["train=cjgrpo", "train.tasks={sudoku: -1, copy: 2}"], "option-range: train.tasks.sudoku"),
        (["train=sft", "train.lora={r: 1.5, alpha: 2, dropout: 0}"], "option-range: train.lora.r"),
        (["train=sft", "train.lora={r: 0, alpha: 2, dropout: 0}"], "option-range: train.lora.r"),
        (["train=deer", "train.lora={r: 2, alpha: 0, dropout: 0}"], "option-range: train.lora.alpha"),
        (["train=sft", "train.lora={r: 2, alpha: 2, dropout: 1}"], "option-range: train.lora.dropout"),
        (["train=deer", "train.lora={r: 2, alpha: 2, dropout: -1}"], "option-range: train.lora.dropout"),
        (
            ["train=deer", "train.shape={hidden_size: 7}"],
            "option-missing: train.shape, intermediate_size",
        ),
        (["train=deer", "train.shape.hidden_size=7"], "option-range: train.shape.hidden_size, num_attention"),
        (["train=deer", "train.shape.num_hidden_layers=0"], "option-range: train.shape.num_hidden_layers"),
        (["train=mini", "train.output="], "path-invalid: train.output"),
        (["train=mini", "train.output=null"], "option-type: train=mini"),
    ],
)
def test_settings_are_checked_before_anything_runs(words: list[str], said: str) -> None:
    with refused(said):
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
    with refused("option-missing: train=own"):
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
    with pytest.raises(UserError, match=rf"{tmp_path}/m (already|has a finished) "):
        trainer([f"train={train}", "train.output=~/m"]).run()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("size", 0, "option-range: train.data.size"),
        ("batch_tokens", -1, "option-range: batch_tokens"),
        ("long", 1.5, "option-range: train.data.long"),
        ("tails", (0.0, 0.0), "option-range: train.data.tails"),
        ("tails", (float("nan"),), "option-range: train.data.tails"),
        ("phases", {}, "option-range: train.data.phases"),
        ("phases", {"3": {"copy": 1}}, "option-range: train.data.phases"),
        ("phases", {"0": {"copy": -1}}, "option-range: phases.0"),
    ],
)
def test_numbers_of_the_data(field: str, value: object, said: str) -> None:
    right = {
        "seed": 0, "phases": {"0": {"copy": 1}}, "size": 4, "batch_tokens": 9, "tails": (1.0,), "long": 0.1,
        "max_response": 9,
    }  # fmt: skip
    assert Pools(**right)
    with refused(said):
        Pools(**{**right, field: value})


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_layers": -1}, "option-range: num_layers"),
        ({"num_heads": 3, "num_kv_heads": 2}, "option-range: num_kv_heads"),
        ({"head_dim": 7}, "option-range: train.model.head_dim"),
        ({"norm_eps": float("nan")}, "option-range: norm_eps"),
    ],
)
def test_shapes_of_a_network(shape: dict[str, float], said: str) -> None:
    with refused(said):
        check_shape(shape)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train=mini", "train.model.num_layers=-1", "train.device=cpu"]) == 2
    assert "train.model.num_layers must be" in capsys.readouterr().err
