"""The whole sampler on Triton's kernels, interpreted, against the same on torch: token for token."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.errors import FallbackWarning
from dllm_sampler.kernels import backend
from dllm_sampler.kernels.backend import Backend
from dllm_sampler.models import fused, quantized
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from tests import toys
from tests.sampling import sampled

CPU = torch.device("cpu")
PROMPTS = [[5, 11, 3], [16]]


@cache
def denoiser(kind: str) -> TransformerDenoiser:
    """`llada`; `gqa`; `dream`: grouped heads, biases, logit shift; `qwen3`: norms of heads, partly turned; `causal`."""
    config = toys.transformer(kv_heads=4 if kind == "llada" else 2).config
    if kind not in ("llada", "gqa"):  # two layers take twice the time, and two kinds with them are enough
        config = replace(config, num_layers=1)
    if kind == "dream":
        config = replace(config, qkv_bias=True)
    if kind in ("qwen3", "causal"):
        config = replace(config, qk_norm=True, rotary_dim=4)
    model, generator = Transformer(config), torch.Generator().manual_seed(2)
    model.init_weights(std=0.8, embedding_std=1.0, generator=generator)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(std=0.5, generator=generator)
    it = toys.wrapped(model, shift=kind == "dream")
    return replace(it, attention="block_causal") if kind == "causal" else it


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was launched."""
    found: Counter[str] = Counter()

    def counted(kernels: Any) -> Any:
        def spy(name: str, kernel: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                found[name] += 1
                return kernel(*args, **kwargs)

            return call

        named = {field.name: getattr(kernels, field.name) for field in fields(kernels)}
        return replace(kernels, **{name: spy(name, kernel) for name, kernel in named.items() if callable(kernel)})

    it: Backend = counted(backend._triton())
    it = replace(it, layer=counted(it.layer))
    monkeypatch.setattr(backend, "_triton", lambda: it)
    return found


def both(it: Any, prompts: list[list[int]] = PROMPTS, tokens: int = 4, **plugins: Any) -> None:
    """The same tokens, forwards and history on either backend."""
    rule = {"name": "threshold", "threshold": 0.4}
    plugins = {"scheduler": rule, "blocks": {"name": "fixed", "length": 3}, "stop": "none", **plugins}
    ours, theirs = (
        Sampler(it, backend=name, **plugins).generate(prompts, max_new_tokens=tokens, seed=3)
        for name in ("triton", "torch")
    )
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.nfe, theirs.nfe)
    assert torch.equal(ours.trace.step_map, theirs.trace.step_map)
    torch.testing.assert_close(ours.trace.logprob, theirs.trace.logprob, rtol=1e-3, atol=1e-4)


LAYER = {"attention", "norm", "qkv_rope", "swiglu"}


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("llada", {"cache": "dual", "temperature": 0.8}),
    ("gqa", {"cache": "prefix"}),
    ("dream", {"cache": "dual"}),
    ("qwen3", {"cache": "dkv"}),
    ("causal", {"cache": "block_causal", "temperature": 0.8}),
    ("llada", {"cache": "none"}),
    ("dream", {"cache": "none"}),
    ("dream", {"cache": "prefix", "temperature": 0.8}),
    ("qwen3", {"cache": "vicinity"}),
    ("causal", {"cache": "none"}),
    ("gqa", {"cache": {"name": "streaming", "inner": "dual", "window": 1, "tail": 0}, "tokens": 7}),
    *(
        (kind, {"cache": cache, "tokens": 3, "scheduler": {"name": "freedave", "draft": 2}})
        for kind, cache in (("gqa", "dual"), ("gqa", "none"), ("causal", "block_causal"), ("causal", "none"))
    ),
    *(
        ("qwen3", {"cache": "dual", "tokens": 2, "guide": {"name": "temperature", "measured": True}, "scheduler": rule})
        for rule in ({"name": "fixed", "score": "entropy"}, {"name": "fixed", "score": "margin"}, {"name": "fixed"})
    ),
]


@pytest.mark.parametrize("run", sampled(RUNS, lambda run: [run[0]]))
def test_same_tokens(run: tuple[str, dict[str, Any]], calls: Counter[str]) -> None:
    kind, options = run
    both(denoiser(kind), **options)
    assert LAYER | {"head"} <= set(calls)


def test_guidance_reads_stored_logits(calls: Counter[str]) -> None:
    both(guided(denoiser("gqa"), 1.5), tokens=3, cache="dual")
    assert LAYER | {"readout"} <= set(calls) and "head" not in calls


OTHERS: list[dict[str, Any]] = [
    {"top_p": 0.9, "temperature": 1.0},
    {"scheduler": "credit"},
    {"scheduler": "klass", "guide": {"name": "temperature", "measured": True}},
    {"guide": ["temperature", "end_tokens"]},
]


@pytest.mark.parametrize("plugins", sampled(OTHERS))
def test_what_kernels_do_not_know_is_read_by_torch(plugins: dict[str, Any], calls: Counter[str]) -> None:
    both(denoiser("dream"), tokens=3, **plugins)
    assert set(calls) >= LAYER and not {"head", "readout"} & set(calls)


@pytest.mark.parametrize("temperature", sampled([0.8, None]))
def test_predictions_are_compared_without_probabilities(temperature: float | None, calls: Counter[str]) -> None:
    """A bound that parts of the block come below, so that a wrong divergence is another history."""
    rule = {"name": "klass", "threshold": 0.2, "divergence": 0.3, "history": 1}
    both(loud(), scheduler=rule, cache="dual", blocks={"name": "fixed", "length": 6}, temperature=temperature)
    assert "readout" in calls and "head" not in calls


def loud() -> TransformerDenoiser:
    """A model that would often choose its mask, if it might."""
    model = copy.deepcopy(denoiser("dream").transformer)
    with torch.no_grad():
        model.lm_head.weight[toys.MASK] = 2 * model.lm_head.weight[[4, 16, 25, 26, 35]].sum(0)  # what it says most
    return replace(denoiser("dream"), model=model)


def test_stored_logits_of_a_scheduler_that_looks_at_them(calls: Counter[str]) -> None:
    rule = {"name": "entropy_renoise", "max_denoising_steps": 2, "t_min": 0.0, "t_max": 0.0}
    both(loud(), scheduler=rule, cache="none", blocks={"name": "fixed", "length": 6})
    assert "readout" in calls and "head" not in calls


def test_distributions_of_a_model_under_autocast(calls: Counter[str]) -> None:
    """Its logits have another dtype than its weights."""
    it = Sampler(denoiser("dream"), scheduler="klass", cache="dual", backend="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(it.generate(PROMPTS, max_new_tokens=4).complete.all())
    assert "readout" in calls


@pytest.mark.parametrize("cache", sampled(["d2", "dllm", "elastic", "sparse"]))
def test_a_cache_that_drives_layers_has_their_modules(cache: str, calls: Counter[str]) -> None:
    both(denoiser("gqa"), cache=cache)
    assert not LAYER & set(calls) and "head" in calls


ORIGIN = {
    "cache": {"name": "d2f", "attention": "block_causal"},
    "blocks": {"name": "pipeline", "length": 3},
    "scheduler": "d2f",
}


@pytest.mark.parametrize(
    ("change", "plugins"),
    [
        ({"attention": "causal_context", "seeds": True}, {}),
        ({}, ORIGIN),
        ({"attention": "block_causal"}, {"cache": {"name": "block_causal", "token_causal": True}}),
    ],
    ids=["context", "origin", "causal"],
)
def test_any_bound_on_what_a_position_sees_runs_on_the_kernels(
    change: dict[str, Any], plugins: dict[str, Any], calls: Counter[str]
) -> None:
    both(replace(denoiser("gqa"), **change), **plugins)
    assert set(calls) >= LAYER


def test_attention_that_the_kernel_does_not_know_has_the_modules_and_one_warning(calls: Counter[str]) -> None:
    backend.warn.cache_clear()
    with pytest.warns(FallbackWarning, match="shadow rows") as warned:
        both(denoiser("gqa"), scheduler="wino", cache="none")
    assert not LAYER & set(calls) and len(warned) == 1
    backend.warn.cache_clear()


def test_weights_side_by_side(calls: Counter[str]) -> None:
    model = Transformer(replace(denoiser("dream").transformer.config, num_layers=1))
    model.init_weights(std=0.8, generator=torch.Generator().manual_seed(1))
    layer, hidden = model.layers[0], torch.randn(1, 3, 32)
    assert isinstance(layer, fused.Layer)
    linears = (layer.q_proj, layer.k_proj, layer.v_proj)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    apart = fused.projected(hidden, *linears)
    assert fused.adjacent(*(linear.weight for linear in linears)) is None
    fused.join(model)
    assert fused.adjacent(*(linear.weight for linear in linears)) is not None
    assert fused.adjacent(*(linear.bias for linear in linears)) is not None
    torch.testing.assert_close(fused.projected(hidden, *linears), apart)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():  # a step of an optimizer is seen
        layer.k_proj.weight += 1
    torch.testing.assert_close(fused.projected(hidden, *linears), torch.cat([linear(hidden) for linear in linears], -1))
    model.double()  # moves them apart
    assert fused.adjacent(*(linear.weight for linear in linears)) is None


@pytest.mark.parametrize(
    ("part", "left"), [("", set()), pytest.param("q_proj", set(), marks=pytest.mark.slow), ("ffn", LAYER - {"swiglu"})]
)
def test_a_hooked_layer_runs_as_it_is(part: str, left: set[str], calls: Counter[str]) -> None:
    it = denoiser("gqa")
    modules: list[Any] = [layer.get_submodule(part) for layer in it.transformer.layers]
    handles = [module.register_forward_hook(lambda module, given, out: out * 1.5) for module in modules]
    try:
        both(it, tokens=3, cache="dual")
    finally:
        for handle in handles:
            handle.remove()
    assert LAYER & set(calls) == left


def test_weights_of_integers(calls: Counter[str]) -> None:
    """Products with them have a kernel of their own, those that belong together in one launch."""
    pytest.importorskip("torchao")
    it = denoiser("dream")
    model = copy.deepcopy(it.transformer)
    quantized.quantize(model, CPU)
    both(replace(it, model=model), tokens=3, cache="dual")
    assert calls["linear"] == 4 * calls["swiglu"] > 0


@pytest.mark.slow
def test_layers_that_are_gone_or_run_twice(calls: Counter[str]) -> None:
    """The last one to run adds what its feed-forward returned, whatever number it has."""
    it = denoiser("gqa")
    for change in (lambda layers: layers.__delitem__(0), lambda layers: layers.append(layers[0])):
        model = copy.deepcopy(it.transformer)
        change(model.layers)
        both(replace(it, model=model), tokens=3, cache="none")
    assert set(calls) >= LAYER


def test_float64_stays_with_torch() -> None:
    with pytest.warns(RuntimeWarning, match="not float64"):
        assert Sampler(toys.denoiser(), backend="triton").kernels is backend.TORCH


def test_bfloat16_runs(calls: Counter[str]) -> None:
    """Rounding differs by design (a step's choice may, too), so nothing but the shape of the run is compared."""
    it = replace(denoiser("gqa"), model=toys.transformer(kv_heads=2, dtype=torch.bfloat16))
    result = Sampler(it, backend="triton", cache="dual", temperature=1.0).generate(PROMPTS, max_new_tokens=2)
    assert bool(result.complete.all()) and LAYER | {"head"} <= set(calls)
