"""Adapters of peft: applied to any model by `model.adapter`, from a folder of their own or beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm_sampler import Sampler
from dllm_sampler.cli.main import main
from dllm_sampler.models import adapter, loading, saving
from dllm_sampler.training.model import Trainable
from tests import tiny
from tests.refusals import refused
from tests.sampling import few, sampled

peft = pytest.importorskip("peft")
LAYER = r"model\.layers\.\d+\..*"
KINDS: dict[str, tuple[str, Any]] = {
    "lora": ("llada", {"target_modules": ["q_proj", "attn_out", "ff_proj"], "r": 3, "lora_alpha": 7}),
    "bias": (
        "dream",
        {"target_modules": ["q_proj"], "r": 2, "bias": "lora_only", "modules_to_save": ["lm_head", "norm"]},
    ),
    "patterns": (
        "sdar",
        {
            "target_modules": LAYER + "_proj", "r": 4, "lora_alpha": 3, "use_rslora": True,
            "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 9}, "exclude_modules": ["up_proj"],
        },
    ),
    "dora": (
        "dream",
        {"target_modules": ["v_proj", "o_proj"], "r": 2, "use_dora": True, "layers_to_transform": [1]},
    ),
    "embedding": ("dream", {"target_modules": ["embed_tokens", "k_proj"], "r": 2}),
    "fused": ("llada2-moe", {"target_modules": ["query_key_value", "dense"], "r": 3}),
    "experts": ("llada-moe", {"target_modules": r".*experts\.[02]\.(gate|down)_proj", "r": 2}),
    "ia3": ("dream", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
}  # fmt: skip


def make(name: str, base: Path, folder: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a random adapter for a checkpoint by peft, and return what peft merges it to, in float64."""
    config = (peft.IA3Config if name == "ia3" else peft.LoraConfig)(**changes)
    network: Any = tiny.tree(load_file(base / "model.safetensors")).double()
    network.name_or_path = str(base)
    if name == "embedding":
        network.model.embed_tokens = torch.nn.Embedding.from_pretrained(network.model.embed_tokens.weight.detach())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made: Any = peft.get_peft_model(network, config)
        for weight in made.parameters():
            if weight.requires_grad:
                weight.data += torch.randn_like(weight) / 4
        made.save_pretrained(folder)
        return made.merge_and_unload().state_dict()


def state(denoiser: Any, base: Path) -> dict[str, torch.Tensor]:
    return saving.named(denoiser.transformer, saving.family_of(base), load_file(base / "model.safetensors"))


@pytest.mark.parametrize("kind", sampled(KINDS))
def test_the_weights_are_those_that_peft_merges(kind: str, tmp_path: Path) -> None:
    """Of every kind of adapter and every way that tensors of a checkpoint lie in ours."""
    name, changes = KINDS[kind]
    base = tiny.write(name, tmp_path / "base")
    right = make(kind, base, tmp_path / "adapter", changes)
    before = torch.get_rng_state()
    found = loading.load(tmp_path / "adapter", device="cpu", dtype="float64").denoiser
    plain = state(loading.load(base, device="cpu", dtype="float64").denoiser, base)
    assert torch.equal(torch.get_rng_state(), before) and found.spec.folder == base
    now = state(found, base)
    for key, tensor in now.items():
        torch.testing.assert_close(tensor, right[key], atol=1e-12, rtol=1e-12, msg=key)
    assert 0 < sum(not torch.equal(now[key], plain[key]) for key in now) < len(now)


def test_it_is_named_or_lies_in_a_folder_with_or_without_weights(tmp_path: Path, capsys: Any) -> None:
    """One answer by all ways, which is not the base's; the command too."""
    base = tiny.write("dream", tmp_path / "base")
    make("lora", base, tmp_path / "alone", {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 40})
    shutil.copytree(base, tmp_path / "both")
    for file in (adapter.CONFIG, adapter.WEIGHTS):
        shutil.copyfile(tmp_path / "alone" / file, tmp_path / "both" / file)
    raw = json.loads((tmp_path / "alone" / adapter.CONFIG).read_text())
    (tmp_path / "alone" / adapter.CONFIG).write_text(json.dumps({**raw, "base_model_name_or_path": "../base"}))
    named = {"path": str(base), "adapter": str(tmp_path / "alone")}
    answers = [
        Sampler.from_pretrained(model, device="cpu").generate("Hello", max_new_tokens=12).trace.logprob.tolist()
        for model in (base, named, {**named, "adapter": tmp_path / "alone"}, tmp_path / "alone", tmp_path / "both")
    ]
    assert answers[0] != answers[1]
    assert all(one == answers[1] for one in answers[2:])
    said = []
    for words in ([f"model={base}", f"model.adapter={tmp_path / 'alone'}"], [f"model={tmp_path / 'alone'}"]):
        assert main([*words, "device=cpu", "max_new_tokens=12", "Hello"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    with refused("options-conflict: model.adapter"):
        loading.load(tmp_path / "both", adapter=tmp_path / "alone")
    with refused("option-not-applicable: train.model, adapter"):
        Trainable.load(tmp_path / "both")
    with refused("option-not-applicable: train.model"):
        Trainable.load(named)


def test_a_tokenizer_beside_the_adapter_is_taken(tmp_path: Path) -> None:
    base = tiny.write("dream", tmp_path / "base")
    make("lora", base, tmp_path / "alone", {"target_modules": ["q_proj"], "r": 2})
    assert getattr(loading.load(tmp_path / "alone", device="cpu").tokenizer, "chat_template", "") == tiny.TEMPLATE
    other = loading.load_tokenizer(base)
    assert other is not None
    other.chat_template = "other"
    other.save_pretrained(tmp_path / "alone")
    assert getattr(loading.load(tmp_path / "alone", device="cpu").tokenizer, "chat_template", "") == "other"


@few("place", ["alone", "both"])
def test_models_of_transformers(place: str, tmp_path: Path) -> None:
    """Merged once, whatever transformers does about a folder with an adapter; modes and gradients are as without."""
    from transformers import BertForMaskedLM

    base = tiny.write("bert", tmp_path / "base")
    network: Any = BertForMaskedLM.from_pretrained(base)
    made: Any = peft.get_peft_model(network, peft.LoraConfig(target_modules=["query", "dense"], r=2, lora_alpha=9))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.fill_(0.1)
    made.save_pretrained(tmp_path / "alone")
    right = made.merge_and_unload().state_dict()
    shutil.copytree(base, tmp_path / "both")
    shutil.copytree(tmp_path / "alone", tmp_path / "both", dirs_exist_ok=True)
    found: Any = loading.load(tmp_path / place, device="cpu").denoiser
    now = found.model.state_dict()
    assert now.keys() == right.keys() and not found.model.training
    assert all(torch.allclose(now[key], right[key], atol=1e-6) for key in now)
    assert all(weight.requires_grad for weight in found.model.parameters())


def test_adapters_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, folder = tiny.write("dream", tmp_path / "base"), tmp_path / "a"
    make("lora", base, folder, {"target_modules": ["q_proj"], "r": 2})
    raw = json.loads((folder / adapter.CONFIG).read_text())
    tensors = load_file(folder / adapter.WEIGHTS)
    first = next(iter(tensors))

    def rejects(refusal: str, model: object = folder, weights: Any = None, **changes: Any) -> None:
        (folder / adapter.CONFIG).write_text(json.dumps({**raw, **changes}))
        save_file(tensors if weights is None else weights, folder / adapter.WEIGHTS)
        with refused(refusal) as error:
            Sampler.from_pretrained(model, device="cpu")  # pyright: ignore[reportArgumentType]
        assert "\n" not in str(error.value)

    rejects("adapter-invalid: base_model_name_or_path, null, model=BASE", base_model_name_or_path=None)
    rejects("adapter-invalid: base_model_name_or_path, nope, model=BASE", base_model_name_or_path="nope")
    rejects(f"adapter-unsupported: {folder}", base_model_name_or_path=".")
    rejects(f"adapter-invalid: model.adapter={base}, adapter_config.json", {"path": str(base), "adapter": str(base)})
    wrong = first.replace("layers.0", "layers.7")
    rejects(f"adapter-incompatible: {adapter.WEIGHTS}, layers.7", weights={wrong: tensors[first]})
    rejects(f"adapter-incompatible: {adapter.WEIGHTS}, lora_", weights={first: tensors[first]})
    rejects(f"adapter-incompatible: {adapter.WEIGHTS}, lora_", r=3)
    rejects(f"adapter-incompatible: {folder}", peft_type="NOPE")
    prompts = {"prompt_embeddings": tensors[first]}
    rejects("adapter-unsupported: PROMPT_TUNING", weights=prompts, peft_type="PROMPT_TUNING", num_virtual_tokens=3)
    tied = tiny.write("illada", tmp_path / "tied")
    make("lora", tied, folder, {"target_modules": ["embed_tokens"], "r": 2})
    tensors, raw = load_file(folder / adapter.WEIGHTS), json.loads((folder / adapter.CONFIG).read_text())
    rejects(f"adapter-incompatible: {folder}, embed_tokens.weight")
    (folder / adapter.WEIGHTS).write_bytes(b"cut")
    with refused("checkpoint-damaged"):
        loading.load(folder, device="cpu")
    (folder / adapter.WEIGHTS).rename(folder / "adapter_model.bin")
    with refused("adapter-invalid: adapter_model.safetensors, adapter_model.bin"):
        loading.load(folder, device="cpu")
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with refused("package-missing: constraints.txt"):
        loading.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}, {}, "temperature=0.6 top_p=0.9 to draw"),
        ({"do_sample": True}, {}, "Set temperature=1.0 to draw"),
        ({"temperature": 0.2}, {}, "Set temperature=0.2 to draw"),
        ({"repetition_penalty": 1.1}, {"temperature": 1.0}, "asks for repetition_penalty=1.1"),
        (
            {"do_sample": True, "temperature": 1.0, "min_p": 0.1},
            {},
            "Set temperature=1.0 to draw tokens that way, without",
        ),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.0}, None),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, None),
        ({"temperature": 1.0, "top_k": 50, "repetition_penalty": 1.0, "use_cache": True}, {}, None),
    ],
)
def test_sampling_values_that_are_not_taken(
    values: dict[str, Any], options: Any, said: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    base = tiny.write("dream", tmp_path / "base")
    raw = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**raw, **values}))
    Sampler.from_pretrained(base, device="cpu", **options)
    told = [str(one.message) for one in recwarn if "generation_config.json" in str(one.message)]
    assert len(told) == (said is not None) and all(str(said) in one for one in told)
