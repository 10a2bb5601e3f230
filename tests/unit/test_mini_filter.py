"""The Learn2PD filter that `mini` ships: it is found, it is what the trainer makes, and it does something."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors import safe_open

from dllm_sampler import Sampler
from dllm_sampler.config import entry
from dllm_sampler.core.spec import TrainedBlocks
from dllm_sampler.training.comparison import rows
from tests.refusals import refused
from tests.tables.markdown import fill, table

MINI = Path(str(files("dllm_sampler") / "models/mini"))
SHIPPED: dict[str, Any] = json.loads((MINI / "filter.json").read_text(encoding="utf-8"))


def test_the_shipped_filter_is_what_the_command_makes() -> None:
    """Its settings are the defaults, and its file says for which model and blocks."""
    defaults = {key: value for key, value in entry("train", "filter").settings.items() if key[0] != "_"}
    places = ("output", "device", "tracker", "data")  # its prompts are tasks of mini: no data are named
    assert defaults["data"]["path"] is None
    assert SHIPPED["settings"] == {key: value for key, value in defaults.items() if key not in places}
    assert (MINI / "filter.safetensors").stat().st_size < 16 * 2**10
    with safe_open(MINI / "filter.safetensors", "pt") as file:
        said = json.loads(file.metadata()["filter"])
    config = json.loads((MINI / "config.json").read_text())
    assert said == {
        "schema": 1, "block_length": 32, "vocab_size": config["vocab_size"], "num_layers": config["n_layers"],
    }  # fmt: skip


def test_mini_takes_its_filter_by_default() -> None:
    """It accepts several tokens per step, which its own threshold of 1 forbids."""
    prompts = ["reverse: Ada, Ben, Cal, Dan", "arithmetic: 47 + 8 - 3", "shuffle: Ada, Ben, Cal"]
    runs = {
        threshold: Sampler.from_pretrained(
            "mini", scheduler={"name": "learn2pd", "threshold": threshold}, device="cpu"
        ).generate(prompts, max_new_tokens=32)
        for threshold in (SHIPPED["settings"]["threshold"], 1.0)
    }
    fast, slow = runs.values()
    assert (fast.tokens_per_forward > 1).all()
    assert (slow.nfe == 32).all()
    assert fast.texts is not None
    assert fast.texts[:2] == ["Dan, Cal, Ben, Ada", "47 + 8 = 55, 55 - 3 = 52"]
    named = {"name": "learn2pd", "filter": str(MINI / "filter.safetensors")}
    again = Sampler.from_pretrained("mini", scheduler=named, device="cpu").generate(prompts, max_new_tokens=32)
    default = Sampler.from_pretrained("mini", scheduler="learn2pd", device="cpu", cache="dual")
    assert torch.equal(again.tokens, fast.tokens)
    assert default.plugins.scheduler.traits.find(TrainedBlocks) == TrainedBlocks(32)


def test_a_filter_travels_with_its_folder_and_with_no_other_model(checkpoint: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    copytree(MINI, copied)
    Sampler.from_pretrained(str(copied), scheduler="learn2pd", device="cpu")
    (copied / "filter.safetensors").unlink()
    with refused("option-missing: scheduler.filter, train=filter, train.model="):
        Sampler.from_pretrained(str(copied), scheduler="learn2pd", device="cpu")
    mine = {"name": "learn2pd", "filter": str(MINI / "filter.safetensors")}
    with refused("filter-incompatible: 177, 18"):
        Sampler.from_pretrained(str(checkpoint), scheduler=mine, device="cpu")
    with refused("plugins-incompatible: blocks.length=32"):
        Sampler.from_pretrained("mini", scheduler="learn2pd", blocks={"name": "fixed", "length": 8}, device="cpu")


def test_the_card_has_the_figures() -> None:
    """Between its markers stands what `filter.json` says."""
    card = (MINI / "README.md").read_text(encoding="utf-8")
    assert fill(card, "filter", table(*rows(SHIPPED["decoding"]))) == card
    test = SHIPPED["test"]
    assert f"precision {test['precision']:.4f}, recall {test['recall']:.4f}" in " ".join(card.split())
