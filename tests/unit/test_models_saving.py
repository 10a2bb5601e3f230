"""Checkpoints written back: the names, numbers and files they had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dllm_sampler.models import loading, saving
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from tests import tiny
from tests.sampling import few
from tests.unit import test_models_loading as checkpoints


def loaded(folder: Path, **options: object) -> TransformerDenoiser:
    denoiser = loading.load(folder, device="cpu", **options).denoiser  # pyright: ignore[reportArgumentType]
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser


@few("name", tiny.TRANSFORMERS)
def test_every_family_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Loaded in float64 and saved: every name, shape, dtype and number, and every other file to the letter."""
    source, target = tiny.write(name, tmp_path / "one"), tmp_path / "two"
    (source / "README.md").write_text("what the old weights can do")
    (source / "modeling_own.py").write_text("")
    saving.save(loaded(source, dtype="float64").transformer, source, target)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    names = {file.name for file in source.iterdir()} - {"README.md"}
    assert {file.name for file in target.iterdir()} == names
    for file in names - {"model.safetensors"}:
        assert (source / file).read_bytes() == (target / file).read_bytes(), file
    assert loaded(target).spec == replace(loaded(source).spec, folder=target)


def test_what_was_learnt_is_what_comes_back(tmp_path: Path) -> None:
    """Each parameter of ours gets a number of its own: none is written in place of another."""
    source = tiny.write("llada2-moe", tmp_path / "one")
    denoiser = loaded(source)
    with torch.no_grad():
        for number, weight in enumerate(denoiser.transformer.parameters()):
            weight.copy_(number + torch.arange(weight.numel()).view_as(weight) / 2**16)
    saving.save(denoiser.transformer, source, tmp_path / "two")
    found = loaded(tmp_path / "two").transformer.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in denoiser.transformer.state_dict().items())


def test_a_masked_lm_comes_back(tmp_path: Path) -> None:
    source, target = tiny.write("bert", tmp_path / "one"), tmp_path / "two"
    one = loading.load(source, device="cpu").denoiser
    assert isinstance(one, MaskedLMDenoiser)
    saving.save(one.model, source, target)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (source / "config.json").read_bytes() == (target / "config.json").read_bytes()
    assert loading.load(target, device="cpu").tokenizer is not None


def test_halves_stay_halves_and_a_tied_head_stays_where_it_was(tmp_path: Path) -> None:
    config = replace(checkpoints.TINY, tie_embeddings=True)
    for name, head in (("with", True), ("without", False)):
        folder = tmp_path / name
        folder.mkdir()
        checkpoints.save(folder, config)
        tensors = {key: tensor.half() for key, tensor in load_file(folder / "model.safetensors").items()}
        if head:
            tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
        saving.save(loaded(folder).transformer, folder, tmp_path / "new" / name)
        found = load_file(tmp_path / "new" / name / "model.safetensors")
        assert found.keys() == tensors.keys() and all(one.dtype == torch.float16 for one in found.values())


def test_code_that_was_not_downloaded_is_the_repositorys(tmp_path: Path) -> None:
    source = tiny.write("dream", tmp_path / "one")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "auto_map": {"AutoModel": "modeling.M", "X": "a/b--c.D"}}))
    network = loaded(source).transformer
    saving.save(network, source, tmp_path / "two", hub="org/name")
    found = json.loads((tmp_path / "two" / "config.json").read_text())
    assert found["auto_map"] == {"AutoModel": "org/name--modeling.M", "X": "a/b--c.D"}
    assert {**found, "auto_map": 0} == {**raw, "auto_map": 0}
    saving.save(network, source, tmp_path / "three")
    assert (tmp_path / "three" / "config.json").read_bytes() == (source / "config.json").read_bytes()
