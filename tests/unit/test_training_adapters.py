"""LoRA on every family: what learns, and that peft itself reads what is saved, under the checkpoint's own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dllm_sampler import Sampler
from dllm_sampler.training import adapters, masking
from dllm_sampler.training.trained import ADAPTER, Trained
from tests import tiny
from tests.refusals import refused
from tests.sampling import sampled
from tests.unit.test_training_sft import lines, trainer

peft = pytest.importorskip("peft")
LORA: dict[str, float] = {"r": 3, "alpha": 5, "dropout": 0}


def tree(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module of the checkpoint's names, as the family's own code has them; matrices are linear layers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, kind = name.split(".")
        module = root
        for part in path[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        leaf = getattr(module, path[-1], None)
        if leaf is None:
            prefix, weight = ".".join(path), tensors.get(f"{'.'.join(path)}.weight", tensor)
            shape = weight.shape if weight.dim() == 2 else (1, 1)
            leaf = nn.Linear(shape[1], shape[0], bias=f"{prefix}.bias" in tensors)
            module.add_module(path[-1], leaf)
        setattr(leaf, kind, nn.Parameter(tensor.clone()))
    return root


@pytest.mark.parametrize("name", sampled(tiny.FAMILIES, lambda name: [name == "sdar"]))
def test_peft_reads_the_adapters_of_every_family(name: str, tmp_path: Path) -> None:
    """Merged by peft into the original tensors, they are the merged checkpoint that is saved."""
    source = tiny.write(name, tmp_path / "m")
    it = Trained.load(str(source), torch.device("cpu"), "float64", LORA, 0)
    with torch.no_grad():
        for number, weight in enumerate(it.learning()):  # up-projections begin at 0
            weight.copy_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 4
            )
    it.save(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / ADAPTER / "adapter_config.json").read_text())["r"] == 3
    found: Any = peft.PeftModel.from_pretrained(tree(before).double(), str(tmp_path / "out" / ADAPTER))
    merged = found.merge_and_unload().state_dict()
    assert before.keys() == after.keys() <= merged.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    layers = len(load_file(tmp_path / "out" / ADAPTER / adapters.WEIGHTS)) // 2
    assert len(changed) == layers > 5
    for key, tensor in after.items():
        torch.testing.assert_close(merged[key].float(), tensor, atol=1e-6, rtol=1e-6, msg=key)
    assert Sampler.from_pretrained(str(tmp_path / "out"), device="cpu").generate("Hi", max_new_tokens=4).texts


@pytest.mark.parametrize("name", sampled([*tiny.FAMILIES, *tiny.NEWER]))
def test_the_gradients_of_adapters(name: str, tmp_path: Path) -> None:
    """Of the loss of masked diffusion, against the plain network with the products added to its weights."""
    from peft.tuners.lora import LoraLayer

    source = str(tiny.write(name, tmp_path / "m"))
    it, plain = (Trained.load(source, torch.device("cpu"), "float64", lora, 0) for lora in (LORA, None))
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
    rows = masking.collate([([7, 9, 30], [41, 5, 5, 6, 12, 3, 8]), ([20], [44, 2, 9])], it.denoiser.spec.eos_id)
    grid = masking.blocks(rows, it.denoiser.spec)
    (masks,) = masking.draw(rows, grid, torch.Generator().manual_seed(3), complementary=False, inverse=True)
    one, losses = masking.chunk(rows, masks.hidden, masks.hidden, it.denoiser.spec), []

    def merged(*given: Any, **options: Any) -> torch.Tensor:
        return torch.func.functional_call(plain.network, weights, given, options)

    for network in (it.network, merged):
        model: Any = network
        losses.append((one.losses(model) * masks.weight.gather(1, one.columns) * one.there).sum())
        losses[-1].backward()
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-11)
    assert len(pairs) > 5 and len(it.learning()) == 2 * len(pairs)
    for place, expected in pairs.items():
        layer: Any = it.adapter.model.get_submodule(place)
        for part, other in zip((layer.lora_A, layer.lora_B), expected, strict=True):
            torch.testing.assert_close(part["default"].weight.grad, other.grad, atol=1e-11, rtol=1e-8, msg=place)


@pytest.mark.slow
def test_weights_in_halves_stay_as_they_are_and_adapters_learn(tmp_path: Path) -> None:
    """A resumed run goes on to the same losses, although frozen weights are not in the saved state."""
    model = tiny.write("sdar", tmp_path / "m")
    changes: dict[str, Any] = {"lora": {**LORA, "dropout": 0.1}, "dtype": "bfloat16", "precision": "bf16"}
    trainer(model, tmp_path / "whole", steps=2, **changes).run()
    run = trainer(model, tmp_path / "parts", steps=2, checkpoint_every=1, **changes)
    step = run.step

    def killed(number: int) -> dict[str, float]:
        if number == 1:
            raise RuntimeError("killed")
        return step(number)

    run.step = killed  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="killed"):
        run.run()
    names = load_file(tmp_path / "parts" / "checkpoint.safetensors").keys()
    assert names and all("lora" in name for name in names)
    assert {weight.dtype for weight in run.trained.learning()} == {torch.float32}
    assert run.trained.denoiser.spec.dtype == torch.bfloat16
    trainer(model, tmp_path / "parts", steps=2, **changes).run()
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert lines(tmp_path / "whole")[2]["gradient"] > 0


def test_refusals() -> None:
    for lora in ({"r": 2}, {}, {"r": 2, "alpha": 1, "dropout": 0, "bias": 1}):
        with refused("option-type: train.lora"):
            adapters.check(lora)
