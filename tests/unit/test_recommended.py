"""Recommended settings of each model, in the command line and in the documentation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dllm_sampler import config
from dllm_sampler.cli.compose import settings
from dllm_sampler.cli.main import main
from tests.refusals import refused
from tests.tables import choose

MODELS = config.entry("experiment", "recommended").settings["models"]


def test_each_entry_can_be_set_and_the_first_is_the_experiment() -> None:
    for model, entries in MODELS.items():
        chosen = [settings([*one["words"], f"model={model}"]) for one in entries]
        assert settings(["experiment=recommended", f"model={model}"]) == chosen[0], model


def test_typed_words_come_first() -> None:
    found = settings(["experiment=recommended", "model=llada-8b", "scheduler=wino", "max_new_tokens=9"])
    assert (found.plugins["scheduler"]["name"], found.options.max_new_tokens) == ("wino", 9)  # type: ignore[index]
    assert found.plugins["cache"]["name"] == "sliding"  # type: ignore[index]


def test_a_hub_id_is_the_model_of_that_id() -> None:
    found = settings(["experiment=recommended", "model=GSAI-ML/LLaDA-8B-Instruct"])
    assert found.plugins["cache"]["name"] == "sliding"  # type: ignore[index]


def test_a_model_without_an_entry_is_refused() -> None:
    with refused("choice-unknown: experiment=recommended, illada-8b, llada-8b"):
        settings(["experiment=recommended", "model=illada-8b"])


def test_info_has_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--info", "model"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for entries in MODELS.values():
        for one in entries:
            assert " ".join(one["words"]) in said
            assert one["source"] in said


def test_the_page_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "choose.md"
    shutil.copy(choose.PAGE, copy)
    before = choose.PAGE.read_text()
    monkeypatch.setattr(choose, "PAGE", copy)
    choose.main()
    assert copy.read_text() == before, "python -m tests.tables.choose"
