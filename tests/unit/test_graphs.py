"""Which steps are recorded, in which sizes, and what is refused with a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.core.noise import CounterNoise, ReplayNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.values import Sizes
from dllm_sampler.engine import buffers, layout
from dllm_sampler.engine.buffers import Step
from dllm_sampler.engine.capture import GraphRecorder
from dllm_sampler.engine.graphs import StaticEngine, model, obstacle, rounded
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.tree import UnsupportedLeaf, map_leaves
from dllm_sampler.kernels import backend
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.moe import MoE, MoeConfig
from dllm_sampler.models.rows import FunctionDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few
from tests.taped import Taped, on_tape, taped


@each(("options", "why"), [({}, "graph-unsupported"), ({"cuda_graph": "yes"}, "choice-unknown: cuda_graph, 'yes'")])
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with refused(why):
        toys.sampler(**{"cuda_graph": True, **options})
    assert type(toys.sampler(cuda_graph="auto").engine(toys.sampler().plugins)) is Engine


def on_a_gpu(denoiser: Denoiser, network: torch.nn.Module) -> Any:
    """What a denoiser of this network says of itself there."""
    return SimpleNamespace(spec=replace(denoiser.spec, device=torch.device("cuda")), model=network)


def why(it: Sampler, network: torch.nn.Module) -> str | None:
    return obstacle(it.plugins, it.noise, on_a_gpu(it.denoiser, network))


@each(
    ("plugins", "sentence"),
    [
        ({"cache": "elastic"}, "cache=elastic reads the device"),
        ({"cache": "dllm"}, "cache=dllm counts forwards"),
        ({"scheduler": {"name": "apd", "verifier": toys.verifier()}}, "scheduler=apd has a state for the batch"),
        ({"noise": ReplayNoise(0, "llada")}, "ReplayNoise draws on the host"),
    ],
)
def test_what_is_refused_on_a_gpu(plugins: dict[str, Any], sentence: str) -> None:
    assert sentence in (why(toys.sampler(**plugins), torch.nn.Linear(1, 1)) or "")
    assert why(toys.sampler(), torch.nn.Linear(1, 1)) is None


class Sharded(torch.nn.Parameter):
    device_mesh = "as a DTensor has"


def hook(network: Any) -> None:
    network.layers[1].register_forward_hook(lambda *_: None)


def forward(network: Any) -> None:
    network.lm_head.forward = lambda hidden: hidden


@few("compiled", [False, True])
@each(
    ("change", "sentence"),
    [
        (lambda network: None, None),
        (lambda network: network.layers[1].to("meta"), "weights are on cpu and meta"),
        (lambda network: network.to("meta"), "weights are on meta"),
        (lambda network: setattr(network.norm, "weight", Sharded(network.norm.weight)), "weights are sharded"),
        (hook, r"the model's layers\.1 has a hook"),
        (forward, "the model's lm_head has a hook"),
    ],
)
def test_models_that_no_recording_repeats(
    compiled: bool, change: Callable[[Any], object], sentence: str | None
) -> None:
    network, it = toys.transformer(), toys.sampler()
    change(network)
    found = why(it, cast(torch.nn.Module, torch.compile(network)) if compiled else network)
    assert found is None if sentence is None else re.search(sentence, found or "")


@each("wrap", [lambda one: one, lambda one: [one], lambda one: {"second": one}])
def test_two_networks_on_two_devices_are_not_recorded(wrap: Callable[[Any], Any]) -> None:
    it = toys.sampler()
    there = on_a_gpu(it.denoiser, toys.transformer())
    there.weak = wrap(SimpleNamespace(spec=it.denoiser.spec, model=torch.nn.Linear(1, 1, device="meta")))
    assert "are on cpu and meta" in (obstacle(it.plugins, it.noise, there) or "")


def test_a_function_that_hides_its_weights_is_not_recorded() -> None:
    """A closure gives no address to compare, so a recording would read memory that is freed."""
    it, network = toys.sampler(), toys.transformer()
    there = replace(it.denoiser.spec, device=torch.device("cuda"))
    hidden, shown = FunctionDenoiser(lambda ids, mask: network(ids), there), FunctionDenoiser(network, there)
    assert "the model is a function" in (obstacle(it.plugins, it.noise, hidden) or "")
    assert obstacle(it.plugins, it.noise, shown) is None


def test_copies_of_weights_that_autocast_frees_are_not_recorded() -> None:
    it, network = toys.sampler(), toys.transformer().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast frees its copies" in (why(it, network) or "")
        assert why(it, network.bfloat16()) is None, "nothing is cast"
        assert why(it, network.float().requires_grad_(False)) is None, "cast in each step"
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert why(it, network.requires_grad_(True)) is None
    assert why(it, network) is None


def test_recordings_hold_for_one_dtype() -> None:
    """Memory that was freed and given out again has the same address and, in half precision, the same size."""
    network = toys.transformer().bfloat16()
    it = toys.wrapped(network)
    before = model(it)
    assert model(it) == before
    for weight in network.parameters():
        weight.data = weight.data.view(torch.float16)
    assert model(it) != before


@each(
    ("dtype", "width", "major", "waiting"),
    [
        (torch.bfloat16, 16, 9, False),
        (torch.bfloat16, 16, 10, False),
        (torch.bfloat16, 16, 8, True),
        (torch.bfloat16, 16, 12, True),
        (torch.float16, 16, 9, True),
        (torch.float32, 16, 9, True),
        (torch.float64, 16, 8, False),
        (torch.bfloat16, 12, 8, False),  # not aligned
    ],
)
def test_experts_that_wait(
    dtype: torch.dtype, width: int, major: int, waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None, raising=False)
    config = MoeConfig(num_experts=2, top_k=1, expert_size=16, layers=frozenset())
    experts = MoE(config, width, None).to(dtype)
    assert ("waits for the GPU" in (why(toys.sampler(), experts) or "")) == waiting
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")  # as in torch 2.8
    assert why(toys.sampler(), experts) is None


def test_recordings_hold_for_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that inference mode made cannot be written to outside it, as under autocast."""
    monkeypatch.setattr("dllm_sampler.engine.graphs.obstacle", lambda *_: None)
    it = toys.sampler("llada", cuda_graph=True)
    first = it.engine(it.plugins)
    assert it.engine(it.plugins) is first and first.inference_mode
    with torch.autocast("cpu", torch.bfloat16):
        assert not it.engine(it.plugins).inference_mode


def test_an_unknown_keeper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Threshold.tell

    def told(self: Any, canvas: Any, query: Any, seen: Any, carry: Any) -> Any:
        return tell(self, canvas, query, seen, None)[0], carry

    monkeypatch.setattr(Threshold, "init", lambda self, canvas: (None, torch.Generator()))
    monkeypatch.setattr(Threshold, "tell", told)
    it = toys.sampler("llada", scheduler="threshold")
    expected = it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    engines = [Taped(it.denoiser, it.plugins, record=taped, must=must) for must in (True, False)]
    for engine in engines:
        monkeypatch.setattr(it, "engine", lambda plugins, samples=1, engine=engine: engine)
        if engine.must:
            with refused("graph-unsupported: carry.1"):
                it.generate(toys.PROMPTS[:2], max_new_tokens=12)
            continue
        with pytest.warns(RuntimeWarning, match=r"Prompts are answered batch by batch: carry\.1 is of type Generator"):
            answers = list(it.generate_many(toys.PROMPTS[:2], max_new_tokens=12))
        assert [answer.tokens.tolist() for answer in answers] == expected.tokens.tolist()
        backend.warn.cache_clear()
        with pytest.warns(RuntimeWarning, match="Steps run without CUDA graphs.*Generator"):
            found = it.generate(toys.PROMPTS[:2], max_new_tokens=12)
        assert torch.equal(found.tokens, expected.tokens) and engine.replays == 0
    with pytest.raises(UnsupportedLeaf, match=r"carry\.1 is of type Generator"):
        map_leaves((torch.zeros(1), torch.Generator()), lambda _, leaf: leaf, "carry")


@pytest.mark.slow
def test_padding_stays_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of someone else's may know no position beyond."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=64,
    )  # fmt: skip
    it = Sampler(MaskedLMDenoiser(BertForMaskedLM(config).eval(), mask_id=3, eos_id=1, pad_id=0), stop="none")
    for length in (5, 33, 52):
        found = []
        for engine in (StaticEngine(it.denoiser, it.plugins), Engine(it.denoiser, it.plugins)):
            monkeypatch.setattr(it, "engine", lambda plugins, samples=1, engine=engine: engine)
            found.append(it.generate([[5 + length % 7] * length], max_new_tokens=12))
        assert torch.equal(found[0].tokens, found[1].tokens)
        assert torch.equal(found[0].trace.generated, found[1].trace.generated)


def test_recorded_sizes_are_hardly_too_large() -> None:
    """From 64 entries on an eighth at most is computed for nothing; of few rows there are three sizes."""
    plugins, spec = toys.sampler(cache="dual").plugins, toys.denoiser().spec
    canvas = layout.canvas([[5]], 2000, [0], spec, plugins.blocks, CounterNoise(), plugins.stop.cuts)
    found = set()
    for size in range(1, 1025):
        sizes = Sizes(queries=size, block=1, computed=size, head_rows=size, longest=size, whole=False, opens=False)
        made = rounded(canvas, sizes._replace(rows=((size, size),)))
        assert size <= min(made.computed, made.head_rows, made.longest, made.queries)
        assert max(made.computed, made.longest) <= (size * 9 / 8 if size > 64 else max(16, 2 * size - 1))
        assert made.head_rows <= max(16, 2 * size - 1)
        found |= {made.computed} if size <= 64 else set()
    assert found == {16, 32, 64}


def recordings(engine: Taped) -> int:
    return sum(isinstance(step, Step) for buffers in engine.free for step in buffers.steps.values())


def on_a_tape(window: int, **plugins: Any) -> tuple[Sampler, Taped]:
    config = replace(toys.transformer(kv_heads=2).config, max_positions=2048)
    model = Transformer(config)
    model.init_weights(std=0.5, embedding_std=1.0, generator=torch.Generator().manual_seed(2))
    blocks = {"name": "fixed", "length": window}
    it = Sampler(toys.wrapped(model.double()), cache="dual", stop="none", blocks=blocks, **plugins)
    return it, on_tape(it)


@pytest.mark.slow
@few("scheduler", [{"name": "threshold", "threshold": 0.7}, "fixed"])
def test_a_generation_makes_few_recordings(scheduler: Any) -> None:
    """Two of a window of 32, whose masks become fewer, and one that refreshes a canvas of less than `MOST` positions.

    One for each number of masks, rounded up by an eighth at most, would make 24.
    """
    it, engine = on_a_tape(32, scheduler=scheduler)
    for _ in range(2):
        it.generate([[5] * 40], max_new_tokens=64)
    assert engine.replays > 8 and 1 < recordings(engine) <= 3


@pytest.mark.slow
def test_a_plugin_that_counts_in_a_plain_number_is_not_recorded_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Threshold.tell

    def told(self: Any, canvas: Any, query: Any, seen: Any, carry: Any) -> Any:
        return tell(self, canvas, query, seen, None)[0], carry + 1

    monkeypatch.setattr(Threshold, "init", lambda self, canvas: 0)
    monkeypatch.setattr(Threshold, "tell", told)
    monkeypatch.setattr("dllm_sampler.engine.graphs.RECORDED", 5)
    it, engine = on_a_tape(16, scheduler={"name": "threshold", "threshold": 2.0})
    found = [it.generate([[5] * 16], max_new_tokens=32)]
    with pytest.warns(RuntimeWarning, match="5 steps are recorded as CUDA graphs, and others run without"):
        found += [it.generate([[5] * 16], max_new_tokens=32) for _ in range(2)]
    assert recordings(engine) == 5 and engine.replays == 2 * 5
    assert all(torch.equal(one.tokens, found[0].tokens) for one in found)


@pytest.mark.slow
def test_answers_of_many_lengths_do_not_use_up_the_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a length that no call has any longer make room for those of a new one."""
    monkeypatch.setattr("dllm_sampler.engine.graphs.RECORDED", 4)
    it, engine = on_a_tape(4, scheduler="fixed")
    for tokens in (5, 6, 7, 8, 9, 10):
        for _ in range(2):
            it.generate([[5] * 16], max_new_tokens=tokens)
        before = engine.replays
        it.generate([[5] * 16], max_new_tokens=tokens)
        assert engine.replays - before == tokens
        assert recordings(engine) <= 4


def records_here(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Samplers record steps on a tape, on a CPU too. Returns the recordings as they are made."""
    made: list[Callable[[], None]] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        made.append(taped(run))
        return made[-1]

    chosen = {"obstacle": lambda *_: None, "GraphRecorder": lambda: partial(record), "StaticEngine": Taped}
    for name, value in chosen.items():
        monkeypatch.setattr(f"dllm_sampler.engine.graphs.{name}", value)
    return made


def test_calls_that_take_turns_find_their_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop may call with many samples, and evaluate with one and with longer blocks."""
    recorded, made = records_here(monkeypatch), []
    options = {"cache": "dual", "scheduler": "fixed", "stop": "none", "temperature": 1.0}
    it, plain = toys.sampler("llada", cuda_graph=True, **options), toys.sampler("llada", **options)
    for seed in range(3):
        for block_length, samples in ((2, 1), (4, 1), (4, 2)):
            asked: Any = {"max_new_tokens": 8, "block_length": block_length, "samples": samples, "seed": seed}
            found, expected = (one.generate(toys.PROMPTS[:1], **asked) for one in (it, plain))
            assert torch.equal(found.tokens, expected.tokens)
        made.append(len(recorded))
    assert made[0] > 0 and made[1] == made[2]
    assert all(engine.free is it._static[0].free for engine in it._static), "they share the room for buffers"


@each("name", ["denoiser", "entropy"])
def test_a_sampler_that_was_changed_records_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records_here(monkeypatch)
    it = toys.sampler("llada", cuda_graph=True)
    first = it.engine(it.plugins)
    assert it.engine(it.plugins) is first
    setattr(it, name, {"denoiser": copy(it.denoiser), "entropy": True}[name])
    assert it.engine(it.plugins) is not first
    assert (first in it._static) == (name != "denoiser"), "a model that is gone keeps no memory"


def test_buffers_belong_to_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one does not wait for what a generation that was given up left there."""
    it = toys.sampler()
    engine, stream = StaticEngine(it.denoiser, it.plugins), 1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    canvas: Any = SimpleNamespace(ids=SimpleNamespace(shape=torch.Size([1, 9]), device=torch.device("cuda")))
    first = engine._found(canvas)
    engine.free.append(first)
    stream = 2
    assert engine._found(canvas) is not first
    stream = 1
    assert engine._found(canvas) is first


def test_prompts_of_many_lengths_share_recordings() -> None:
    it, engine = on_a_tape(4, scheduler="fixed")
    made = []
    for length in (700, 1100, 800, 1024, 717, 933, 1061):
        it.generate([[5] * length], max_new_tokens=4)
        made.append(recordings(engine))
    assert made[-1] <= 3 * 3 and len(engine.free) == 3, "canvases of 768, 1024 and 1280 positions"
    it.generate([[6] * 987], max_new_tokens=4)
    assert recordings(engine) == made[-1]


@pytest.mark.slow
def test_the_host_copies_no_state_around_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the next step is known before the host looks at the last one."""
    it, engine = on_a_tape(8, scheduler="fixed")
    for _ in range(2):
        it.generate([[5] * 16], max_new_tokens=16)
    walks, walked = [], buffers.map_leaves
    monkeypatch.setattr(buffers, "map_leaves", lambda *args: walks.append(args[2]) or walked(*args))
    before = engine.replays
    it.generate([[5] * 16], max_new_tokens=16)
    assert engine.replays - before == 16 and len(walks) == len(buffers.PARTS), "what begins a generation is copied"


def test_each_engine_has_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of one pool overwrite each other, and two threads replay on streams of their own."""
    monkeypatch.setattr("dllm_sampler.engine.graphs.obstacle", lambda *_: None)
    made = [toys.sampler("llada", cuda_graph=True) for _ in range(2)]
    one, other = (cast(StaticEngine, it.engine(it.plugins)).record for it in made)
    assert isinstance(one, GraphRecorder) and isinstance(other, GraphRecorder) and one is not other
    cuda = Cuda(monkeypatch)
    for record in (one, other, one):
        record(lambda: None)
    assert cuda.pools == [(1, 0), (1, 0), (2, 0), (2, 0), (1, 0)], "an empty graph opens each pool"
    assert cuda.handles == [0, 2, 4], "a thread may never have multiplied, and cannot begin during a recording"


@each("closes", [True, False])
def test_a_recording_that_fails_closes_its_pool(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its memory is never released, and the next recording may fail."""
    cuda, record = Cuda(monkeypatch), GraphRecorder()
    cuda.closes = closes

    def fails() -> None:
        raise RuntimeError("operation not permitted")

    record(lambda: None)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        record(fails)
    assert cuda.closed == ([("end", 0, (1, 0)), ("release", 0, (1, 0))] if closes else [])
    record(lambda: None)
    assert cuda.pools[-2:] == [(2, 0), (2, 0)], "the next one has another pool"


def test_threads_record_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording begins by waiting for the GPU, which the driver refuses during another one."""
    Cuda(monkeypatch)
    running, most = 0, 0

    def run() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        sleep(0.02)
        running -= 1

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(GraphRecorder(), run) for _ in range(3)]:
            done.result()
    assert most == 1


class Cuda:
    """What a recorder uses of torch, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made, self.closes = 0, True
        self.pools: list[tuple[int, int]] = []
        self.handles: list[int] = []  # of cuBLAS, by the number of recordings before
        self.closed: list[tuple[str, int, tuple[int, int]]] = []
        graph = SimpleNamespace(replay=lambda: None)
        for name, value in {
            "graph_pool_handle": self.handle, "Stream": lambda *_: None, "CUDAGraph": lambda: graph,
            "current_device": lambda: 0, "current_stream": lambda *_: None, "stream": lambda _: nullcontext(),
            "graph": self.graph, "current_blas_handle": lambda: self.handles.append(len(self.pools)),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(
            torch._C,
            "_cuda_releasePool",
            lambda device, pool: self.closed.append(("release", device, pool)),
            raising=False,
        )

    def handle(self) -> tuple[int, int]:
        self.made += 1
        return self.made, 0

    def graph(self, _: object, pool: tuple[int, int], **more: object) -> Any:
        self.pools.append(pool)
        return nullcontext()

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.closes:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.closed.append(("end", device, pool))
