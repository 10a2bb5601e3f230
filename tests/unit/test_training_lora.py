"""LoRA on every family: what learns, and that peft itself reads what is saved, under the checkpoint's own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForMaskedLM

from dllm_sampler import Sampler
from dllm_sampler.models.adapter import WEIGHTS
from dllm_sampler.training import masked
from dllm_sampler.training.masked import Dice
from dllm_sampler.training.model import ADAPTER, Trainable
from tests import tiny
from tests.sampling import sampled
from tests.unit.test_training_runs import trainer

peft = pytest.importorskip("peft")
LORA: dict[str, float] = {"r": 3, "lora_alpha": 5}


@pytest.mark.parametrize("name", sampled(tiny.FAMILIES, lambda name: [name == "sdar"]))
def test_peft_reads_the_adapters_of_every_family(name: str, tmp_path: Path) -> None:
    """Merged by peft into the original tensors, they are the merged checkpoint that is saved."""
    source = tiny.write(name, tmp_path / "m")
    it = Trainable.load(source, "float64", peft.LoraConfig(**LORA)).eval()
    with torch.no_grad():
        for number, weight in enumerate(it.learned().values()):  # up-projections begin at 0
            weight.copy_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 4
            )
    it.save(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / ADAPTER / "adapter_config.json").read_text())["r"] == 3
    found: Any = peft.PeftModel.from_pretrained(tiny.tree(before).double(), str(tmp_path / "out" / ADAPTER))
    merged = found.merge_and_unload().state_dict()
    assert before.keys() == after.keys() <= merged.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    layers = len(load_file(tmp_path / "out" / ADAPTER / WEIGHTS)) // 2
    assert len(changed) == layers > 5
    for key, tensor in after.items():
        torch.testing.assert_close(merged[key].float(), tensor, atol=1e-6, rtol=1e-6, msg=key)
    assert Sampler.from_pretrained(str(tmp_path / "out"), device="cpu").generate("Hi", max_new_tokens=4).texts


@pytest.mark.parametrize("name", sampled([*tiny.FAMILIES, *tiny.NEWER]))
def test_the_gradients_of_adapters(name: str, tmp_path: Path) -> None:
    """Of the loss of masked diffusion, against the plain network with the products added to its weights."""
    from peft.tuners.lora import LoraLayer

    source = str(tiny.write(name, tmp_path / "m"))
    it, plain = (Trainable.load(source, "float64", lora).eval() for lora in (peft.LoraConfig(**LORA), None))
    prefix = "" if it.inner is it.network else "model."
    weights: dict[str, torch.Tensor] = {**dict(plain.network.named_parameters())}
    pairs: dict[str, list[torch.Tensor]] = {}
    for number, (place, layer) in enumerate(it.adapter.model.named_modules()):
        if isinstance(layer, LoraLayer):
            parts: list[Any] = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
            generator = torch.Generator().manual_seed(number)
            parts[1].data = torch.randn(parts[1].shape, generator=generator, dtype=torch.float64) / 4
            pairs[place] = [part.detach().clone().requires_grad_() for part in parts]
            down, up = pairs[place]
            weights[f"{prefix}{place}.weight"] = weights[f"{prefix}{place}.weight"].detach() + 5 / 3 * up @ down
    rows = masked.collate([([7, 9, 30], [41, 5, 5, 6, 12, 3, 8]), ([20], [44, 2, 9])], it.denoiser.spec.eos_id)
    grid = masked.blocks(rows, it.denoiser.spec)
    (masks,) = masked.draw(rows, grid, Dice([3, 4]), complementary=False, inverse=True)
    one, losses = masked.chunk(rows, masks.hidden, masks.hidden, it.denoiser.spec), []

    def merged(*given: Any, **options: Any) -> torch.Tensor:
        return torch.func.functional_call(plain.network, weights, given, options)

    for network in (it.network, merged):
        model: Any = network
        losses.append((one.losses(model) * masks.weight.gather(1, one.columns) * one.there).sum())
        losses[-1].backward()
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-11)
    assert len(pairs) > 5 and len(it.learned().values()) == 2 * len(pairs)
    for place, expected in pairs.items():
        layer: Any = it.adapter.model.get_submodule(place)
        for part, other in zip((layer.lora_A, layer.lora_B), expected, strict=True):
            torch.testing.assert_close(part["default"].weight.grad, other.grad, atol=1e-11, rtol=1e-8, msg=place)


def test_weights_in_halves_stay_as_they_are_and_adapters_learn(tmp_path: Path) -> None:
    """A run that resumes comes to the same losses, although frozen weights are in no checkpoint."""
    model = tiny.write("sdar", tmp_path / "m")
    changes: dict[str, Any] = {"dtype": "bfloat16", "bf16": True, "max_steps": 2, "per_device_train_batch_size": 2}
    lora = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
    whole = trainer("sft", model, tmp_path / "run", peft_config=lora, **changes)
    whole.train()
    names = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors").keys()
    assert names and all("lora" in name and ("q_proj" in name or "up_proj" in name) for name in names)
    assert {weight.dtype for weight in whole.trained.learned().values()} == {torch.float32}
    assert whole.trained.spec.dtype == torch.bfloat16
    again = trainer("sft", model, tmp_path / "run", peft_config=lora, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    one, other = whole.state.log_history[1], again.state.log_history[1]
    assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"]) and one["grad_norm"] > 0
    whole.save_model()
    whole.save_model(str(tmp_path / "twice"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "twice"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items()), "the model has its adapters still"


def test_a_model_of_transformers_in_memory(tmp_path: Path) -> None:
    """As it is, with its tokenizer; what is saved is merged, and the model has its adapters still."""
    folder = tiny.write("bert", tmp_path / "m")
    bert, tokenizer = BertForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    given = {"processing_class": tokenizer, "peft_config": peft.LoraConfig(r=2, lora_alpha=4)}
    run = trainer("sft", bert, tmp_path / "run", max_steps=1, report_to="tensorboard", **given)
    run.train()
    run.save_model()
    assert len(run.trained.learned()) > 5 and any(tmp_path.glob("run/**/events*"))
    assert Sampler.from_pretrained(str(tmp_path / "run"), device="cpu").generate("Hi", max_new_tokens=4).texts
