"""Checkpoints: what loads, what each broken one is refused for, and what is written back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dllm_sampler.models import loading, saving
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.families import DREAM, LLADA, llada_config, to_checkpoint
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.models.yarn import Yarn
from tests import tiny
from tests.refusals import refused
from tests.sampling import each, few
from tests.unit import test_models_loading as checkpoints

# Checkpoints: what loads, and the one sentence each broken one gets


TINY = TransformerConfig(
    vocab_size=24, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    rope_theta=5000.0, norm_eps=1e-6, max_positions=64,
)  # fmt: skip
BLOCK = "model.transformer.blocks.0."


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def save(folder: Path, config: TransformerConfig = TINY) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config)
    save_file(to_checkpoint(model), folder / "model.safetensors")
    write_json(folder / "config.json", llada_config(config, mask_token_id=23, eos_token_id=22, pad_token_id=21))
    return model


def shard(folder: Path) -> dict[str, str]:
    """Split `model.safetensors` in two behind an index; the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    located = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        located |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": located})
    return located


def load(folder: Path, dtype: torch.dtype | str | None = None) -> TransformerDenoiser:
    denoiser = loading.load(folder, device="cpu", dtype=dtype).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser


@each("sharded", [False, True])
@each("switches", [{}, {"qkv_bias": True}, {"tie_embeddings": True}])
def test_round_trip(tmp_path: Path, switches: dict, sharded: bool):
    config = replace(TINY, **switches)
    model = save(tmp_path, config)
    if sharded:
        shard(tmp_path)
    loaded = load(tmp_path)
    assert loaded.transformer.config == config
    assert (loaded.mask_id, loaded.eos_id, loaded.pad_id, loaded.shift) == (23, 22, 21, False)
    ids = torch.randint(0, 24, (2, 9))
    torch.testing.assert_close(loaded.transformer(ids), model(ids), atol=0, rtol=0)
    assert not loaded.transformer.training
    assert all(weight.device.type == "cpu" and weight.requires_grad for weight in loaded.transformer.parameters())


def test_dream_round_trip(tmp_path: Path):
    config = replace(TINY, qkv_bias=True)
    model = Transformer(config)
    save_file(to_checkpoint(model, DREAM), tmp_path / "model.safetensors")
    raw = {
        "model_type": "Dream", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
        "max_position_embeddings": 64, "mask_token_id": 23, "pad_token_id": 21, "sliding_window": None,
    }  # fmt: skip
    write_json(tmp_path / "config.json", raw)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [22, 21]})
    loaded = load(tmp_path)
    assert loaded.transformer.config == config
    assert (loaded.spec.eos_id, loaded.spec.eos_ids, loaded.shift) == (22, (22, 21), True)
    ids = torch.randint(0, 24, (2, 9))
    torch.testing.assert_close(loaded.transformer(ids), model(ids), atol=0, rtol=0)


def test_dtypes(tmp_path: Path):
    model = save(tmp_path).half()
    save_file(to_checkpoint(model), tmp_path / "model.safetensors")
    assert load(tmp_path).spec.dtype == torch.float32  # half precision is no arithmetic for a CPU
    assert load(tmp_path, "bfloat16").spec.dtype == torch.bfloat16
    assert load(tmp_path, torch.float16).spec.dtype == torch.float16
    assert load(tmp_path, "torch.float64").spec.dtype == torch.float64


def test_harmless_buffers_and_a_superfluous_tied_head_are_skipped(tmp_path: Path):
    model = save(tmp_path, replace(TINY, tie_embeddings=True))
    tensors = to_checkpoint(model) | {
        BLOCK + "rotary_emb.inv_freq": torch.ones(2),
        "model.transformer.ff_out.weight": model.embed.weight.detach().clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.randint(0, 24, (1, 5))
    torch.testing.assert_close(load(tmp_path).transformer(ids), model(ids))


def test_other_files_in_the_folder_are_not_opened(tmp_path: Path):
    save(tmp_path)
    (tmp_path / "consolidated.safetensors").write_text("rubbish")
    (tmp_path / "pytorch_model.bin").write_text("rubbish")
    load(tmp_path)


def test_a_later_write_to_the_file_does_not_reach_the_model(tmp_path: Path):
    model = save(tmp_path)
    loaded = load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    torch.testing.assert_close(loaded.transformer.embed.weight, model.embed.weight)


def test_tokenizer(tmp_path: Path):
    save(tmp_path)
    assert loading.load(tmp_path).tokenizer is None
    words = Tokenizer(WordLevel({"a": 0, "<|eot_id|>": 5, "?": 6}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    loaded = loading.load(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("a") == [0]
    assert loaded.denoiser.spec.eot_id == 5
    (tmp_path / "tokenizer_config.json").unlink()
    assert isinstance(loading.load(tmp_path).tokenizer, PreTrainedTokenizerFast)


def test_tokenizer_code_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}})
    words = Tokenizer(WordLevel({"a": 3, "?": 6}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    own = True\n"
    )
    with refused("code-untrusted: model.trust_remote_code=true"):
        loading.load(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokenizer = loading.load(tmp_path, trust_remote_code=True).tokenizer
    assert tokenizer is not None
    assert type(tokenizer).__name__ == "Own"
    assert tokenizer.encode("a") == [3]


def test_broken_tokenizer(tmp_path: Path):
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("tokenizer-invalid"):
        loading.load(tmp_path)


@each("device_map", ["auto", "cpu", {"": "cpu"}, {"embed": "cpu", "layers": "cpu", "norm": "cpu"}])
def test_device_map(tmp_path: Path, device_map: str | dict):
    model = save(tmp_path)
    if isinstance(device_map, dict) and "embed" in device_map:
        with refused("device-map-invalid: lm_head"):
            loading.load(tmp_path, device_map=device_map)
        return
    denoiser = loading.load(tmp_path, device_map=device_map).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    ids = torch.randint(0, 24, (1, 5), device=denoiser.spec.device)
    torch.testing.assert_close(denoiser.transformer(ids).cpu(), model(ids.cpu()))


def test_offloaded_layers_are_driven_through_their_hooks(tmp_path: Path):
    from accelerate import cpu_offload

    model = save(tmp_path)
    offloaded = load(tmp_path).transformer
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert offloaded.embed.weight.device.type == "meta"

    def drive(index, layer, hidden, rope, rows):
        hidden = hidden + layer.attend(*layer.qkv(hidden, rope))
        return hidden + layer.mlp(hidden)

    ids = torch.randint(0, 24, (1, 5))
    with torch.no_grad():
        torch.testing.assert_close(offloaded.head(offloaded(ids, drive=drive)), model(ids))


Damage = Callable[[Path], object]


def edit(**fields: Any) -> Damage:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {key: value for key, value in (raw | fields).items() if value != "drop"})

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(folder: Path) -> None:
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors")

    return apply


def cut(size: int) -> Damage:
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def index(change: Callable[[Path, dict], object]) -> Damage:
    def apply(folder: Path) -> None:
        content: dict[str, Any] = {"weight_map": shard(folder)}
        change(folder, content)
        write_json(folder / "model.safetensors.index.json", content)

    return apply


@each(
    ("damage", "sentence"),
    [
        (lambda f: (f / "config.json").unlink(), "checkpoint-incomplete: config.json"),
        (lambda f: (f / "config.json").write_text("{'a': 1}"), "json-invalid: config.json"),
        (lambda f: (f / "config.json").write_text("[1]"), "json-invalid"),
        (edit(model_type="gpt5"), 'architecture-unknown: "gpt5"'),
        (edit(model_type="drop"), "architecture-unknown"),
        (edit(n_layers="drop"), "checkpoint-config-invalid: field n_layers"),
        (edit(n_layers="two"), 'checkpoint-config-invalid: n_layers, "two"'),
        (edit(rope_theta=-1), "checkpoint-config-invalid: rope_theta, -1"),
        (edit(weight_tying=1), "checkpoint-config-invalid: weight_tying"),
        (edit(n_heads=3), "checkpoint-config-invalid: config.json"),
        (edit(n_kv_heads=3), "checkpoint-config-invalid: config.json"),
        (edit(alibi=True), "checkpoint-unsupported: ="),
        (edit(rope=False), "checkpoint-unsupported: ="),
        (edit(layer_norm_type="default"), 'checkpoint-unsupported: layer_norm_type, =, "default"'),
        (edit(block_type="sequential"), 'checkpoint-unsupported: block_type, =, "sequential"'),
        (edit(scale_logits=True), "checkpoint-unsupported: scale_logits, ="),
        (edit(input_emb_norm=True), "checkpoint-unsupported: input_emb_norm, ="),
        (edit(mask_token_id="drop"), "mask-token-missing: mask_token_id"),
        (edit(eos_token_id="drop"), "end-token-missing: eos_token_id"),
        (edit(mask_token_id=24), "token-outside-vocabulary: mask_token_id, 24"),
        (
            tensors(lambda t: t.pop("model.transformer.ln_f.weight")),
            "checkpoint-tensors: model.transformer.ln_f.weight",
        ),
        (
            tensors(lambda t: [t.pop(name) for name in sorted(t) if "blocks" in name]),
            "checkpoint-tensors: blocks.0, 15",
        ),
        (tensors(lambda t: t.update(more=torch.ones(1))), "checkpoint-tensors: 1 tensor that, more"),
        (
            tensors(lambda t: t.update({BLOCK + "k_proj.weight": torch.ones(16, 16)})),
            "checkpoint-tensors: model.transformer.blocks.0.k_proj.weight, [16, 16]",
        ),
        (edit(d_model=32, n_heads=8, n_kv_heads=4), "checkpoint-tensors"),
        (cut(5000), "checkpoint-damaged: model.safetensors"),
        (cut(20), "checkpoint-damaged: model.safetensors"),
        (cut(0), "checkpoint-damaged: model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 4000), "checkpoint-damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "checkpoint-incomplete: model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "checkpoint-pickled: pytorch_model.bin"),
        (
            index(lambda f, _: (f / "model-00002-of-00002.safetensors").unlink()),
            "checkpoint-incomplete: model-00002-of-00002.safetensors",
        ),
        (index(lambda _, content: content.pop("weight_map")), "checkpoint-damaged: weight_map"),
        (index(lambda _, content: content["weight_map"].update(a="../a.safetensors")), 'checkpoint-damaged: "../a.saf'),
        (
            index(lambda _, content: content["weight_map"].update(a="model-00001-of-00002.safetensors")),
            "checkpoint-tensors",
        ),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, damage: Damage, sentence: str):
    save(tmp_path)
    damage(tmp_path)
    with refused(sentence) as caught:
        loading.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path)
    with refused("choice-unknown: 'float23', 'float32'"):
        loading.load(tmp_path, dtype="float23")
    with refused("choice-unknown: torch.int8"):
        loading.load(tmp_path, dtype=torch.int8)
    with refused("choice-unknown: 'gpu'"):
        loading.load(tmp_path, device="gpu")
    with refused("device-map-invalid"):
        loading.load(tmp_path, device_map={"": "disk"})
    with refused("choice-unknown: model.device_map.norm='x'"):
        loading.load(tmp_path, device_map={"": "cpu", "norm": "x"})
    with refused("token-outside-vocabulary: model.eos_id, 24"):
        loading.load(tmp_path, eos_id=24)
    with refused("mask-token-invalid: model.eos_id"):
        loading.load(tmp_path, eos_id=23)
    edit(eos_token_id="drop")(tmp_path)
    assert loading.load(tmp_path, eos_id=5).denoiser.spec.eos_ids == (5,), "as the error about a missing one says"
    with refused("model-not-found"):
        loading.load(tmp_path / "missing")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refused("device-missing: device=cuda"):
        loading.load(tmp_path, device="cuda")


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path)
    asked = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", download)
    loading.load("some-org/model-1.5", revision="v2")
    assert (asked["name"], asked["revision"]) == ("some-org/model-1.5", "v2")
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["patterns"])
    loading.load("some-org/model-1.5", trust_remote_code=True)
    assert "*.py" in asked["patterns"]

    def unreachable(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    with refused("hub-unreachable: hf download some-org/model-1.5, model.path"):
        loading.load("some-org/model-1.5")


def test_llada_format_cannot_say_everything():
    for name, value in {"qk_norm": True, "o_bias": True, "head_dim": 2, "yarn": Yarn(factor=2.0, original=64)}.items():
        with refused(f"export-unsupported: {name}"):
            llada_config(replace(TINY, **{name: value}), mask_token_id=1, eos_token_id=2, pad_token_id=3)
    assert LLADA.config(llada_config(TINY, mask_token_id=1, eos_token_id=2, pad_token_id=3)) == TINY


def test_a_longest_text_that_is_no_number(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": {}}))
    with refused("checkpoint-config-invalid: tokenizer_config.json, model_max_length"):
        loading.load_tokenizer(copy)


# Checkpoints written back: the names, numbers and files they had


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
