"""Weights as 8-bit integers: what they are, what they cost in quality, and what cannot have them."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.models import fused, quantized
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer, Transformer
from tests import toys
from tests.refusals import refused
from tests.sampling import each

PROMPTS = ["reverse: Ada, Ben, Cal, Dan", "sort: Dan, Ada, Cal", "copy: Ada, Ben"]

pytest.importorskip("torchao")


def layers(sampler: Sampler) -> list[Layer]:
    assert isinstance(sampler.denoiser, TransformerDenoiser)
    return [layer for layer in sampler.denoiser.transformer.layers if isinstance(layer, Layer)]


@pytest.fixture(scope="module")
def mini() -> Sampler:
    return Sampler.from_pretrained({"name": "mini", "quantize": "int8"}, backend="torch")


def numbers_of(linear: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    found = quantized.int8_parts(linear.weight)  # pyright: ignore
    assert found is not None
    return found


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def toy(request: pytest.FixtureRequest) -> tuple[Transformer, Transformer]:
    """A model before and after."""
    model = Transformer(replace(toys.transformer(kv_heads=2).config, qkv_bias=request.param))
    model.init_weights(std=0.3, embedding_std=1.0, generator=torch.Generator().manual_seed(2))
    before = copy.deepcopy(model)
    quantized.quantize(model, torch.device("cpu"))
    return before, model


def test_each_number_is_the_nearest_multiple_of_its_outputs_scale(toy: tuple[Transformer, Transformer]) -> None:
    before, after = toy
    for name, module in after.named_modules():
        if name.endswith("_proj"):
            numbers, scale = numbers_of(module)
            original: Any = before.get_submodule(name).weight
            assert numbers.dtype == torch.int8 and scale.shape == (len(numbers), 1)
            assert bool(((numbers * scale - original).abs() <= scale * 0.501).all())
            assert bool((numbers.int().abs().amax(1) >= 127).all())


@torch.no_grad()
def test_the_model_computes_with_them(toy: tuple[Transformer, Transformer]) -> None:
    before, after = toy
    ids = torch.arange(12).view(2, 6)
    unlike = float((after(ids) - before(ids)).abs().max())
    for name, module in after.named_modules():
        if name.endswith("_proj"):
            numbers, scale = numbers_of(module)
            before.get_submodule(name).weight.copy_(numbers * scale)  # pyright: ignore
    torch.testing.assert_close(after(ids), before(ids), rtol=1e-4, atol=1e-5)
    assert unlike > 1e-2
    assert bool(Sampler(toys.wrapped(after), cache="dual").generate([[5, 7]], max_new_tokens=4).complete.all())


def test_embedding_head_and_norms_stay(mini: Sampler) -> None:
    plain = Sampler.from_pretrained("mini", backend="torch")
    ours, theirs = (one.denoiser.transformer.state_dict() for one in (mini, plain))  # pyright: ignore
    assert ours.keys() == theirs.keys()
    same = {name for name in ours if type(ours[name]) is torch.Tensor and torch.equal(ours[name], theirs[name])}
    assert {name for name in ours if "proj" not in name} == same


def test_answers_stay_right(mini: Sampler) -> None:
    assert mini.generate(PROMPTS, max_new_tokens=16).texts == ["Dan, Cal, Ben, Ada", "Ada, Cal, Dan", "Ada, Ben"]


def test_what_is_multiplied_together_lies_together(mini: Sampler) -> None:
    hidden = torch.randn(1, 3, 128)
    for layer in layers(mini):
        for linears in ((layer.q_proj, layer.k_proj, layer.v_proj), (layer.ffn.gate_proj, layer.ffn.up_proj)):
            together = fused._together([one.weight for one in linears])  # pyright: ignore
            assert isinstance(together, tuple)
            numbers, scale = together
            apart = torch.cat([one(hidden) for one in linears], -1)  # pyright: ignore
            torch.testing.assert_close((hidden @ numbers.float().T) * scale, apart, rtol=1e-5, atol=1e-5)


def test_other_weights_are_no_integers() -> None:
    assert quantized.int8_parts(torch.ones(2, 3)) is None
    assert quantized.int8_parts(torch.nn.Parameter(torch.ones(2, 3))) is None


@each(
    ("model", "options", "sentence"),
    [
        ({"quantize": "int4"}, {}, "choice-unknown: model.quantize, int8, 'int4'"),
        ({"quantize": "int8"}, {"dtype": "float64"}, "options-conflict: bfloat16, float32"),
        ({"quantize": "int8"}, {"dtype": "float16"}, "options-conflict: bfloat16, float32"),
        ({"quantize": "int8", "device_map": "auto"}, {}, "options-conflict: model.quantize, device_map"),
    ],
)
def test_what_cannot_be(model: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        Sampler.from_pretrained({"name": "mini", **model}, **options)


def test_what_activations_take_part_in_is_left_to_its_own_code() -> None:
    from torchao.quantization import Int8Tensor, quantize_
    from torchao.quantization.quant_api import Int8WeightOnlyConfig

    linear = torch.nn.Linear(8, 3)
    quantize_(linear, Int8WeightOnlyConfig(set_inductor_config=False, version=2))
    assert isinstance(linear.weight.data, Int8Tensor) and quantized.int8_parts(linear.weight) is not None
    linear.weight.act_pre_scale = torch.tensor(2.0)  # pyright: ignore
    assert quantized.int8_parts(linear.weight) is None


def test_nothing_of_it_can_be_trained(toy: tuple[Transformer, Transformer]) -> None:
    assert not any(weight.requires_grad for weight in toy[1].parameters())


def test_experts_cannot() -> None:
    with refused("option-not-applicable: model.quantize"):
        quantized.quantize(toys.causal_transformer(), torch.device("cpu"))


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with refused("package-missing: constraints.txt, '.[quantize]'"):
        quantized.quantize(toys.transformer(), torch.device("cpu"))
