"""DiffusionGemma against transformers' own forward and against recorded runs of transformers' own `generate`."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_sampler import Canvas, Query, Result, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache
from dllm_sampler.engine import layout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.models.diffusion_gemma import DiffusionGemmaDenoiser, Memory
from tests import toys
from tests.conformance import lines, replay
from tests.conformance.builder import Checkpoints, Setup
from tests.conformance.diffusion_gemma import Watched
from tests.refusals import refused
from tests.sampling import sampled

DATA = Path(__file__).parent / "data"
NAME, CANVAS, VOCAB = "tiny-diffusion-gemma", 16, 288
CHECKPOINTS = Checkpoints(DATA)
LINES = lines.read(DATA, "diffusion-gemma")
REFERENCE = load_file(DATA / NAME / "forward.safetensors")
PROMPTS = [[284, 103, 22, 280, 12], [284, 101, 22, 32, 271, 44, 28, 49, 280, 46, 33, 21, 101, 28, 49, 32, 24, 7], [284]]
RENOISE = {"name": "entropy_renoise", "max_denoising_steps": 6, "entropy_bound": 2.0, "confidence_threshold": 1.0}


@cache
def denoiser() -> DiffusionGemmaDenoiser:
    loaded = CHECKPOINTS.load(NAME)
    assert isinstance(loaded, DiffusionGemmaDenoiser)
    return loaded


def sampler(scheduler: Any = RENOISE, **plugins: Any) -> Sampler:
    return Sampler(denoiser(), scheduler=scheduler, **{"stop": "none", **plugins})


def laid_out(prompts: list[list[int]], tokens: int = CANVAS) -> tuple[Canvas, Cache]:
    spec = denoiser().spec
    canvas = layout.canvas(
        prompts, tokens, [0] * len(prompts), spec, FixedBlocks().bind(toys.context(spec)), CounterNoise(), False
    )
    return canvas, NoCache().init(canvas, spec)


def ask(canvas: Canvas, live: Cache, shown: Tensor, previous: Tensor | None = None) -> Tensor:
    """Logits `[B, K, CANVAS, V]` where the block shows `shown [B, K, CANVAS]`."""
    query = Query(canvas.window(CANVAS), shown)
    plan = toys.planned(canvas, query, denoiser().spec, live)
    plan = replace(plan, wanted=replace(plan.wanted, previous=previous))
    hidden, _ = denoiser()(canvas, query, plan)
    return plan.head_rows.spread(denoiser().head(hidden))


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=1e-4, rtol=0.0)


def test_recorded_forward_with_and_without_self_conditioning() -> None:
    canvas, live = laid_out(REFERENCE["prompt_ids"].tolist())
    shown = REFERENCE["canvas_ids"][:, None]
    close(ask(canvas, live, shown)[:, 0], REFERENCE["logits"])
    later = replace(canvas, age=canvas.age + 1)
    fed = REFERENCE["self_conditioning_logits"]
    close(ask(later, live, shown, fed)[:, 0], REFERENCE["logits_self_conditioned"])
    # What the last block left behind is void when a block opens.
    close(ask(canvas, live, shown, fed)[:, 0], REFERENCE["logits"])


def test_a_finished_canvas_joins_the_memory() -> None:
    """Encoded piece by piece behind prompts of two lengths, as transformers encodes the whole text at once."""
    generator = torch.Generator().manual_seed(0)
    first, second, third = torch.randint(VOCAB - 10, (3, 2, CANVAS), generator=generator)
    canvas, live = laid_out(PROMPTS[:2], 3 * CANVAS)
    for block in (first, second, third):
        logits = ask(canvas, live, block[:, None])
        columns = canvas.window(CANVAS)
        ids = canvas.ids.scatter(1, columns, block)
        canvas = replace(canvas, ids=ids).advance(torch.tensor([True, True]), CANVAS, None)
    assert isinstance(live.memory, Memory)
    assert live.memory.width == CANVAS
    for row, prompt in enumerate(PROMPTS[:2]):
        text = torch.tensor([prompt + first[row].tolist() + second[row].tolist()])  # longer than the sliding window
        with torch.no_grad():
            whole = denoiser().model(input_ids=text, decoder_input_ids=third[row : row + 1]).logits
        close(logits[row], whole)


def test_hypotheses_are_answered_each() -> None:
    canvas, live = laid_out(PROMPTS)
    shown = torch.randint(VOCAB, (3, 2, CANVAS), generator=torch.Generator().manual_seed(1))
    fed = torch.randn(3, CANVAS, VOCAB, generator=torch.Generator().manual_seed(2))
    later = replace(canvas, age=canvas.age + 1)
    together = ask(later, live, shown, fed)
    for k in range(2):
        close(together[:, k : k + 1], ask(later, live, shown[:, k : k + 1], fed))
    assert (together[:, 0] - together[:, 1]).abs().max() > 0.1


@pytest.mark.parametrize("line", sampled(LINES, name=lambda line: line.id))
def test_recorded_runs(line: lines.Line) -> None:
    setup = replay.prepare(line, CHECKPOINTS)
    assert isinstance(setup, Setup)
    verdict = replay.replay(line, setup)
    assert verdict.status == "passed", verdict.reason
    scheduler = setup.sampler.plugins.scheduler
    assert isinstance(scheduler, Watched)
    assert line.model_extra is not None
    assert scheduler.canvases == line.model_extra["canvas_before_each_step"]


@pytest.mark.parametrize("change", sampled([{"entropy_bound": 3.0}, {"t_max": 0.9}, {"stability_threshold": 3}]))
def test_another_setting_is_another_run(change: dict[str, Any]) -> None:
    def fails(line: lines.Line) -> bool:
        setup = replay.prepare(line.model_copy(update={"params": line.params | change}), CHECKPOINTS)
        assert isinstance(setup, Setup)
        return replay.replay(line, setup).status == "failed"

    assert any(map(fails, LINES))


def assert_same_row(batch: Result, row: int, alone: Result) -> None:
    assert torch.equal(batch.tokens[row], alone.tokens[0])
    assert torch.equal(batch.trace.generated[row], alone.trace.generated[0])
    assert (batch.nfe[row], batch.trace.rows[row]) == (alone.nfe[0], alone.trace.rows[0])


DDIM = {"name": "discrete_ddim", "max_denoising_steps": 5, "corrector_steps": 1, "confidence_threshold": 4.0}


@pytest.mark.parametrize("scheduler", sampled([DDIM, RENOISE, {"name": "block_refine", "steps": 5, "threshold": 0.5}]))
def test_a_row_in_a_batch_is_the_row_alone(scheduler: dict[str, Any]) -> None:
    seeds = [4, 5, 6]
    batch = sampler(scheduler).generate(PROMPTS, max_new_tokens=40, seed=seeds)  # the last canvas is cut
    assert len(set(batch.nfe.tolist())) > 1, "rows should have been in different canvases"
    for row, prompt in enumerate(PROMPTS):
        assert_same_row(batch, row, sampler(scheduler).generate([prompt], max_new_tokens=40, seed=seeds[row]))


def test_the_last_canvas_is_decoded_whole_and_cut() -> None:
    whole = sampler().generate(PROMPTS, max_new_tokens=2 * CANVAS)
    *_, last = sampler().stream(PROMPTS, max_new_tokens=CANVAS + 3)
    assert last.result is not None
    assert torch.equal(last.tokens, whole.trace.decoded[:, : CANVAS + 3])
    assert torch.equal(last.result.tokens, whole.tokens[:, : CANVAS + 3])
    assert torch.equal(last.result.nfe, whole.nfe)
    assert (last.result.trace.end == last.result.trace.origin + CANVAS + 3).all()
    assert last.result.complete.all()


def test_what_is_computed() -> None:
    """The decoder's canvas in each forward, and every token of the text before the last canvas once."""
    result = sampler().generate(PROMPTS[0], max_new_tokens=2 * CANVAS)
    assert result.trace.rows.tolist() == [int(result.nfe) * CANVAS + len(PROMPTS[0]) + CANVAS]


@pytest.mark.parametrize("scheduler", sampled([DDIM, RENOISE]))
def test_a_step_reads_nothing(scheduler: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step, taken = Engine.step, []

    def under_watch(engine: Engine, state: Generation) -> None:
        with no_host_reads():
            step(engine, state)
        taken.append(state)

    monkeypatch.setattr(Engine, "step", under_watch)
    result = sampler(scheduler).generate(PROMPTS[:2], max_new_tokens=2 * CANVAS, max_steps=7)
    assert len(taken) == int(result.nfe.max())


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"scheduler": "threshold"}, "plugins-incompatible: scheduler=threshold, scheduler=entropy_renoise"),
        ({"scheduler": {"name": "remdm"}}, "plugins-incompatible: scheduler=remdm"),
        ({"blocks": {"name": "fixed", "length": 8}}, "plugins-incompatible: blocks.length=16"),
        ({"blocks": "full"}, "plugins-incompatible: blocks=full"),
        ({"cache": "prefix"}, "cache-incompatible: cache=prefix, cache=none"),
        ({"cache": "dual"}, "cache-incompatible: cache=dual"),
        ({"stop": "truncate"}, "plugins-incompatible: stop=truncate, stop=prefix"),
    ],
)
def test_what_cannot_work_is_refused(plugins: dict[str, Any], said: str) -> None:
    with refused(said):
        Sampler(denoiser(), **{"scheduler": "entropy_renoise", **plugins})


@pytest.mark.parametrize("stop", sampled(["prefix", "block", "prophet"]))
def test_stops(stop: str) -> None:
    ends = replace(denoiser(), eos_id=101)  # a token that does occur
    results = [
        Sampler(ends, scheduler=RENOISE, stop=which).generate(PROMPTS, max_new_tokens=3 * CANVAS, seed=11)
        for which in ("none", stop)
    ]
    if stop == "prophet":
        assert results[1].complete.all()
        return
    full, early = results
    assert torch.equal(early.lengths, full.lengths)
    assert (early.nfe < full.nfe).any()
    answer = torch.arange(3 * CANVAS) < full.lengths[:, None]
    assert torch.equal(early.tokens[answer], full.tokens[answer])


def test_guidance_needs_a_mask() -> None:
    with refused("mask-token-missing"):
        Sampler.from_pretrained({"path": str(DATA / NAME), "cfg_scale": 1.0}, scheduler="entropy_renoise")
