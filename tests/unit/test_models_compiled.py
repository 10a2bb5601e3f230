"""`compile=true`: the parts of a layer are compiled, once for all layers, and whatever drives them stays the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler, UserError
from dllm_sampler.models import compiled
from dllm_sampler.models.transformer import Layer
from tests import toys


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was handed to torch.compile; it runs as it is, since a compiler takes minutes."""
    found: list[str] = []

    def compile(part: Any) -> Any:
        found.append(part.__name__)
        return part

    compiled.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", compile)
    yield found
    compiled.compiled.cache_clear()


@pytest.mark.parametrize(
    ("kind", "cache", "names"),
    [
        ("gqa", "none", {"qkv", "attend", "mlp"}),
        ("cfg", "dual", {"qkv", "attend", "mlp"}),
        ("dream", "d2", {"qkv", "attend", "mlp", "weights"}),
        ("llada", "dllm", {"qkv", "attend", "mlp", "values"}),
        ("causal", "block_causal", {"qkv", "attend", "mlp"}),
    ],
)
def test_same_answers(kind: str, cache: str, names: set[str], parts: list[str]) -> None:
    plain, other = (
        toys.sampler(kind, cache=cache, compile=flag).generate(toys.PROMPTS[:2], max_new_tokens=12)
        for flag in (False, True)
    )
    assert torch.equal(plain.tokens, other.tokens) and torch.equal(plain.nfe, other.nfe)
    assert sorted(parts) == sorted(names)  # each once


def test_a_model_of_others_is_refused() -> None:
    with pytest.raises(UserError, match="compile the model inside Spy"):
        Sampler(toys.Spy(toys.denoiser()), compile=True)


def test_dynamo_takes_a_part_whole() -> None:
    """With torch's own tracer, without a code generator: no break in the graph, no new graph per layer."""
    torch._dynamo.reset()
    model = toys.transformer(kv_heads=2)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    part = torch.compile(Layer.mlp, backend=count, fullgraph=True)
    hidden = torch.randn(1, 3, 32, dtype=torch.float64)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        torch.testing.assert_close(part(layer, hidden), layer.mlp(hidden))
    assert len(graphs) == 1
