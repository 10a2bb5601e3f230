"""`compile=true`: the parts of layers and steps are compiled, once for all, and whatever drives them stays the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.engine import decide, loop
from dllm_sampler.engine.graphs import StaticEngine
from dllm_sampler.kernels import compiling
from dllm_sampler.models.transformer import Layer
from tests import toys
from tests.refusals import refused
from tests.sampling import few, sampled


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was handed to torch.compile; it runs as it is, since a compiler takes minutes."""
    found: list[str] = []

    def compile(part: Any) -> Any:
        found.append(part.__name__)
        return part

    compiling.compiled.cache_clear()
    compiling.fullgraph.cache_clear()
    monkeypatch.setattr(torch, "compile", compile)
    yield found
    compiling.compiled.cache_clear()
    compiling.fullgraph.cache_clear()


@few(
    ("kind", "cache", "names"),
    [
        ("gqa", "none", {"qkv", "output", "mlp"}),
        ("cfg", "dual", {"qkv", "output", "mlp"}),
        ("dream", "d2", {"qkv", "attend", "mlp", "weights"}),
        ("llada", "dllm", {"qkv", "attend", "mlp", "values"}),
        ("causal", "block_causal", {"qkv", "output", "mlp"}),
    ],
)
def test_same_answers(kind: str, cache: str, names: set[str], parts: list[str]) -> None:
    plain, other = (
        toys.sampler(kind, cache=cache, compile=flag).generate(toys.PROMPTS[:2], max_new_tokens=12)
        for flag in (False, True)
    )
    assert torch.equal(plain.tokens, other.tokens) and torch.equal(plain.nfe, other.nfe)
    assert sorted(parts) == sorted(names | {"ask", "tell"})  # each once


def test_a_model_of_others_is_refused() -> None:
    with refused("compile-unsupported"):
        Sampler(toys.Spy(toys.denoiser()), compile=True)
    with refused("choice-unknown: 'all'"):
        toys.sampler(compile="all")


def test_a_step_alone_is_compiled_whatever_the_model(parts: list[str]) -> None:
    Sampler(toys.Spy(toys.denoiser()), compile="step").generate(toys.PROMPTS[:2], max_new_tokens=6)
    assert set(parts) == {"ask", "tell"}


@pytest.mark.slow
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


STEPS = [("threshold", "none"), ("threshold", "dual"), ("fixed", "none"), ("fixed", "dual")]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compiles the parts of a step with a backend of one's own; the layers are left as they are."""
    torch._dynamo.reset()

    def use(backend: Any) -> None:
        made = {part: torch.compile(part, backend=backend, fullgraph=True) for part in (decide.ask, decide.tell)}
        monkeypatch.setattr(loop, "fullgraph", lambda part: made.get(part, part))

    yield use
    torch._dynamo.reset()


def answers(scheduler: str, cache: str) -> tuple[Any, Any]:
    plain, other = (
        toys.sampler("gqa", scheduler=scheduler, cache=cache, stop="prefix", compile=flag)
        .generate(toys.PROMPTS, max_new_tokens=18, seed=toys.SEEDS)
        .trace
        for flag in (False, "step")
    )
    return plain, other


@pytest.mark.slow
@pytest.mark.parametrize("plugins", sampled(STEPS))
def test_dynamo_takes_a_step_whole(plugins: tuple[str, str], steps: Any) -> None:
    """A break in the graph is an error here. Sizes change from step to step and do not make new graphs each time."""
    graphs: list[Any] = []
    steps(lambda graph, inputs: (graphs.append(graph), graph.forward)[1])
    plain, other = answers(*plugins)
    for name in ("ids", "step_map", "nfe", "rows"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name
    assert 2 <= len(graphs) <= 10


class InPlace(StaticEngine):
    """Steps as they are recorded, and no recording."""

    def _recorded(self, state: Any, record: Any) -> None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("plugins", STEPS[1::2])
def test_compiled_steps_in_place(plugins: tuple[str, str], steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled part returns finds its home, though it may be one of the buffers that it was given."""
    steps("eager")

    def engine(it: Sampler, plugins: Any, samples: int = 1) -> StaticEngine:
        return InPlace(it.denoiser, plugins, record=lambda run: run, compile=it.compile)

    monkeypatch.setattr(Sampler, "engine", engine)
    plain, other = answers(*plugins)
    for name in ("ids", "step_map", "nfe", "rows"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("plugins", STEPS)
def test_a_compiled_step_is_few_kernels(plugins: tuple[str, str], steps: Any) -> None:
    """With the code generator, on a CPU: what a step does around the model and the readout."""
    from torch._inductor import metrics  # a second of imports that other tests do without
    from torch._inductor.compile_fx import compile_fx

    graphs: list[Any] = []

    def generate(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compile_fx(graph, inputs)

    metrics.reset()
    steps(generate)
    plain, other = answers(*plugins)
    for name in ("ids", "step_map", "nfe", "rows"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name
    assert metrics.generated_kernel_count / len(graphs) < 30
