"""The sampler on Triton's kernels and on CUDA graphs: the tokens of torch, step by step."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dllm_sampler import Sampler, UserError
from dllm_sampler.config import names
from dllm_sampler.engine.buffers import Step
from dllm_sampler.engine.capture import GraphRecorder
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.models import fused, quantized
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, sampled


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def denoiser(kind: str, dtype: torch.dtype) -> TransformerDenoiser:
    config = replace(toys.transformer(kv_heads=2).config, hidden_size=64, head_dim=16, intermediate_size=128)
    if kind == "dream":
        config = replace(config, qkv_bias=True)
    if kind == "causal":
        config = replace(config, qk_norm=True, rotary_dim=8)
    model = Transformer(config)
    model.init_weights(std=0.5, embedding_std=1.0, generator=torch.Generator().manual_seed(2))
    model = model.to("cuda", dtype)
    fused.join(model)
    it = toys.wrapped(model, shift=kind == "dream")
    return replace(it, attention="block_causal") if kind == "causal" else it


def same(it: Any, first: dict[str, Any], second: dict[str, Any], **plugins: Any) -> Sampler:
    """The same tokens and history under two sets of options; the sampler of the second."""
    plugins = {"blocks": {"name": "fixed", "length": 8}, "stop": "none", **plugins}
    samplers = [Sampler(it, **plugins, **options) for options in (first, second)]
    for prompts, seed in ((toys.PROMPTS, 0), ([p[::-1] for p in toys.PROMPTS], 9)):  # the second replays
        one, other = (s.generate(prompts, max_new_tokens=24, seed=seed) for s in samplers)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.nfe, other.nfe)
        assert torch.equal(one.trace.step_map, other.trace.step_map)
    return samplers[1]


MODELS = [
    ("gqa", "none"), ("gqa", "dual"), ("gqa", "prefix"), ("dream", "dual"), ("causal", "block_causal"), ("gqa", "dkv"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "temperature", "graph"), crossed(MODELS, [None, 0.8], [False, True], together=2))
def test_triton_answers_as_torch_does(model: tuple[str, str], temperature: float | None, graph: bool) -> None:
    kind, cache = model
    it = denoiser(kind, torch.float32)
    ours = {"backend": "triton", "cuda_graph": graph}
    same(it, {"backend": "torch"}, ours, cache=cache, temperature=temperature)


@pytest.mark.parametrize("graph", [False, True])
def test_weights_of_integers(graph: bool) -> None:
    pytest.importorskip("torchao")
    it = denoiser("dream", torch.float32)
    model = it.transformer
    quantized.quantize(model, torch.device("cuda"))
    same(it, {"backend": "torch"}, {"backend": "triton", "cuda_graph": graph}, cache="dual")


@pytest.mark.parametrize("kind", ["gqa", "causal"])
def test_drafts(kind: str) -> None:
    cache = "block_causal" if kind == "causal" else "dual"
    same(denoiser(kind, torch.float32), {"backend": "torch"}, {"backend": "triton"}, cache=cache, scheduler="freedave")


def met(pair: tuple[str, str]) -> list[str]:
    """Scheduler and cache, if their steps are recorded."""
    scheduler, cache = pair
    try:
        plugins = toys.sampler("causal" if cache == "block_causal" else "llada", **named(pair)).plugins
    except UserError:
        return ["refused"]
    return [f"scheduler {scheduler}", f"cache {cache}"] if is_recorded(plugins) else ["not recorded"]


def is_recorded(plugins: Plugins) -> bool:
    cache = plugins.cache
    return plugins.scheduler.traits.graph_safe and not cache.syncs and not cache.shared


def named(pair: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("scheduler", "cache"), pair, strict=True))


PAIRS = sampled(list(product(names("scheduler"), names("cache"))), met, "-".join)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_graph_repeats_the_step(pair: tuple[str, str]) -> None:
    scheduler, cache = pair
    model = denoiser("causal" if cache == "block_causal" else "gqa", torch.float64)
    try:
        plugins = Sampler(model, scheduler=scheduler, cache=cache).plugins
    except UserError as error:
        pytest.skip(f"they do not go together: {error}")
    if not is_recorded(plugins):
        with refused("graph-unsupported: cuda_graph"):
            Sampler(model, scheduler=scheduler, cache=cache, cuda_graph=True)
        return
    it = same(model, {}, {"cuda_graph": True}, scheduler=scheduler, cache=cache)
    (engine,) = it._static
    assert engine.record is not None
    (kept,) = engine.free
    assert any(isinstance(step, Step) for step in kept.steps.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ends(dtype: torch.dtype) -> None:
    it = Sampler(denoiser("gqa", dtype), cache="dual", cuda_graph=True, temperature=1.0)
    assert it.kernels.name == "triton"
    assert bool(it.generate(toys.PROMPTS, max_new_tokens=24).complete.all())


@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("cache", ["none", "dual", "block_causal"])
def test_a_step_on_kernels_never_synchronises(cache: str) -> None:
    it = Sampler(denoiser("causal" if cache == "block_causal" else "gqa", torch.bfloat16), cache=cache, temperature=1.0)
    assert it.kernels.name == "triton"
    it.generate(toys.PROMPTS, max_new_tokens=16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_that_is_not_the_current_one(graph: bool) -> None:
    it = denoiser("gqa", torch.float32)
    there = replace(it, model=it.transformer.to("cuda:1"))
    same(there, {"backend": "torch"}, {"backend": "triton", "cuda_graph": graph}, cache="dual")


def test_a_recording_does_not_outlive_its_weights() -> None:
    it = denoiser("gqa", torch.float64)
    sampler = Sampler(it, cache="dual", cuda_graph=True, blocks={"name": "fixed", "length": 8})
    for _ in range(3):
        sampler.generate(toys.PROMPTS, max_new_tokens=16)
    for weight in it.transformer.parameters():
        weight.data = weight.data * 1.1
    plain = Sampler(it, cache="dual", blocks={"name": "fixed", "length": 8})
    found, expected = (one.generate(toys.PROMPTS, max_new_tokens=16) for one in (sampler, plain))
    assert torch.equal(found.tokens, expected.tokens)


def test_recordings_come_and_go() -> None:
    """Each is gone before the next is made, and one that fails leaves the stream and the next one alone."""
    record = GraphRecorder()
    x, before = torch.zeros(4, device="cuda"), torch.cuda.current_stream()

    def adds() -> None:
        x.add_(torch.ones_like(x))

    def reads() -> None:
        x.sum().item()

    for number in range(1, 4):
        replay = record(adds)
        replay()
        del replay
        assert x.tolist() == [number] * 4
    with pytest.raises(RuntimeError):
        record(reads)
    assert torch.cuda.current_stream() == before
    record(adds)()
    assert x.tolist() == [4] * 4
