"""Rollouts: what a generation leaves behind for a trainer, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dllm_sampler import Sampler, Trace
from dllm_sampler.core.recorder import aligned
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from tests import toys
from tests.refusals import refused

TOKENS = 13


@pytest.mark.parametrize(
    "plugins",
    [
        {"scheduler": {"name": "threshold", "threshold": 0.6}, "temperature": 1.0},
        {"scheduler": "random_order", "cache": "dual"},
        {"scheduler": "fixed", "stop": "truncate", "temperature": 1.5},
        {"scheduler": "ascending", "blocks": "full", "temperature": 1.0},
    ],
    ids=lambda plugins: plugins["scheduler"] if isinstance(plugins["scheduler"], str) else "threshold",
)
def test_every_state_is_rebuilt_and_every_run_repeated(plugins: dict[str, Any], tmp_path: Path) -> None:
    """What the denoiser was shown, from the step map of a saved trace alone; and the same run again from its seeds."""
    sampler = toys.sampler(**plugins, entropy=True)
    spy = toys.Spy(sampler.denoiser)
    sampler.denoiser = spy
    trace = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS).trace
    trace.save(tmp_path / "t")
    trace = Trace.load(tmp_path / "t")
    assert not trace.revised.any()
    for canvas, _, _ in spy.calls:
        live = ~canvas.done
        seen = trace.seen(canvas.step)
        assert torch.equal(seen[live], aligned(canvas, canvas.seen(), False)[live])
        shown = torch.where(seen, trace.state(canvas.step), toys.EOS)
        assert torch.equal(shown[live], torch.where(seen, aligned(canvas, canvas.ids, 0), toys.EOS)[live])
    again = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=trace.seeds.tolist()).trace
    assert trace.entropy is not None and again.entropy is not None
    for name in ("ids", "step_map", "gone", "logprob", "entropy"):
        assert torch.equal(getattr(trace, name), getattr(again, name)), name


def test_entropy_is_the_predictions() -> None:
    trace = toys.sampler(entropy=True, temperature=1.0).generate(toys.PROMPTS[1:2], max_new_tokens=TOKENS).trace
    assert trace.entropy is not None
    for column in range(trace.origin, trace.ids.shape[1]):
        state = trace.state(int(trace.step_map[0, column]))
        with torch.no_grad():
            logits = toys.transformer()(state)[0, column]
        logits[toys.MASK] = -torch.inf
        chances = logits.softmax(-1)
        assert float(trace.entropy[0, column]) == pytest.approx(float(torch.special.entr(chances).sum()), abs=1e-12)
        assert float(trace.logprob[0, column]) == pytest.approx(
            float(chances[trace.ids[0, column]].log()), abs=1e-12
        ), "of a float64 model in float64"


@pytest.mark.parametrize("kind", ["llada", "dream", "causal"])
def test_samples_are_those_of_repeated_prompts(kind: str) -> None:
    sampler = toys.sampler(kind, temperature=1.0)
    prompts = [[*prompt, *range(9)] for prompt in toys.PROMPTS]  # some of whole blocks before the last
    repeated = [prompt for prompt in prompts for _ in range(3)]
    one = sampler.generate(prompts, max_new_tokens=TOKENS, samples=3, seed=5)
    two = sampler.generate(repeated, max_new_tokens=TOKENS, seed=5)
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.nfe, two.nfe)
    assert torch.equal(one.step_map, two.step_map)
    torch.testing.assert_close(one.trace.logprob, two.trace.logprob, atol=1e-10, rtol=0)
    assert len({tuple(row) for row in one.tokens[:3].tolist()}) > 1
    saved = (two.trace.rows - one.trace.rows).view(-1, 3).tolist()
    for prompt, rows in zip(prompts, saved, strict=True):
        shared = len(prompt) // 6 * 6 if kind == "causal" else 0
        assert rows == [0, shared, shared]
    with refused("option-range: samples"):
        sampler.generate(prompts, max_new_tokens=TOKENS, samples=0)


def state_of(module: nn.Module) -> list[Any]:
    """All that sampling must leave alone."""
    parameters = list(module.parameters())
    grads = [None if p.grad is None else p.grad.clone() for p in parameters]
    return [[p.detach().clone() for p in parameters], grads, [p.requires_grad for p in parameters], module.training]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_module_in_training_is_left_alone(training: bool, autocast: bool) -> None:
    module = toys.transformer(dtype=torch.float32).train(training)
    module(torch.tensor([[1, 2, 3]])).square().mean().backward()
    next(module.parameters()).requires_grad_(False)
    sampler = Sampler(TransformerDenoiser(module, toys.MASK, toys.EOS), temperature=1.0, entropy=True)
    before, random = state_of(module), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, samples=2)
    assert torch.equal(torch.get_rng_state(), random)
    after = state_of(module)
    for one, two in zip(before, after, strict=True):
        if not isinstance(one, list):
            assert one == two
            continue
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a is b
    module(torch.tensor([[1, 2, 3]])).square().mean().backward()  # the graph is still there to be made


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_what_a_generation_returns_can_be_learned_from(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in torch's inference mode, whose tensors autograd refuses; none of them is returned or kept."""
    module, modes = toys.transformer(dtype=torch.float32), set[bool]()
    head = TransformerDenoiser.head

    def watched(denoiser: TransformerDenoiser, hidden: Tensor) -> Tensor:
        modes.add(torch.is_inference_mode_enabled())
        return head(denoiser, hidden)

    monkeypatch.setattr(TransformerDenoiser, "head", watched)
    denoiser = TransformerDenoiser(module, toys.MASK, toys.EOS)
    sampler = Sampler(guided(denoiser, scale), temperature=1.0, entropy=True, cache="dual")
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    many = list(sampler.generate_many(toys.PROMPTS, max_new_tokens=TOKENS, batch_size=2))
    assert modes == {True}
    for one in (result, *many):
        assert one.trace is not None
        for held in (one, one.trace):
            tensors = [value for value in vars(held).values() if isinstance(value, Tensor)]
            assert tensors and not any(value.is_inference() for value in tensors)
        module(one.trace.ids).log_softmax(-1).gather(-1, one.trace.ids[..., None]).sum().backward()


def test_tensors_that_outlive_a_forward_are_ordinary_ones() -> None:
    """Inference mode is not for modules that somebody has wrapped, nor for autocast, which keeps copies of weights."""

    def made(change: Callable[[Transformer], Any] = lambda module: module) -> bool:
        return TransformerDenoiser(change(toys.transformer(dtype=torch.float32)), toys.MASK, toys.EOS).inference_mode

    def hooked(module: Transformer, where: str) -> Transformer:
        module.get_submodule(where).register_forward_hook(lambda module, given, found: None)
        return module

    def parametrized(module: Transformer) -> Transformer:
        parametrize.register_parametrization(module.get_submodule("layers.0.o_proj"), "weight", nn.Identity())
        return module

    class Other(Transformer): ...

    assert made() and not made(parametrized)
    assert not any(made(lambda module, at=at: hooked(module, at)) for at in ("", "layers.1", "layers.0.ffn"))
    assert not made(lambda module: Other(module.config))
    with torch.autocast("cpu", torch.bfloat16):
        assert not made()
