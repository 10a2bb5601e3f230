"""A scheduler in diffusers' `DiffusionGemmaPipeline` 0.42, on transformers' own model: noise are random tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.diffusion_gemma.pipeline_diffusion_gemma import DiffusionGemmaPipeline
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementScheduler
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaDecoderModel

from dllm_sampler import Canvas, CounterNoise, Sampler
from dllm_sampler.integrations.diffusers import DllmScheduler
from dllm_sampler.models.loading import load
from tests.contract.cases import Settings
from tests.refusals import refused

# diffusers 0.42 calls this static method by a name that transformers 5.24 has renamed without an alias.
BUILDER = DiffusionGemmaDecoderModel.create_diffusion_decoder_attention_mask
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "past_key_values" not in inspect.signature(BUILDER).parameters,
        reason="this diffusers has no DiffusionGemma pipeline for this transformers",
    ),
]
CHECKPOINT = Path(__file__).parents[1] / "conformance" / "data" / "tiny-diffusion-gemma"
LENGTH, VOCAB, STEPS = 16, 288, 6
PROMPTS = [[284, 103, 22, 280, 12], [284, 101, 22, 32, 271]]


class Processor:
    """Chat messages are token ids already."""

    def apply_chat_template(self, messages: list[list[dict[str, Any]]], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in one[0]["content"].split()] for one in messages])}


@cache
def network() -> DiffusionGemmaForBlockDiffusion:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(CHECKPOINT).eval()


@dataclass
class Watch:
    """Counts forwards of the decoder."""

    forwards: int = 0

    def __call__(self, *_: Any) -> None:
        self.forwards += 1


def run(scheduler: Any, prompts: list[list[int]], seed: int = 0, canvases: int = 2, **options: Any) -> tuple[Any, int]:
    """Tokens, and forwards of the decoder."""
    pipeline = DiffusionGemmaPipeline(model=network(), scheduler=scheduler, processor=Processor())
    pipeline.set_progress_bar_config(disable=True)
    watch = Watch()
    hook = network().model.decoder.register_forward_hook(watch)
    given = {"num_inference_steps": STEPS, "confidence_threshold": None, "gen_length": canvases * LENGTH, **options}
    texts = [" ".join(map(str, one)) for one in prompts]
    generator = torch.Generator().manual_seed(seed)
    out = pipeline(texts, generator=generator, output_type="seq", **given)  # pyright: ignore[reportArgumentType]
    hook.remove()
    assert not isinstance(out, tuple)
    return out.sequences, watch.forwards


@pytest.mark.parametrize("stop", [None, pytest.param(5.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threshold", [0.05, pytest.param(0.1, marks=pytest.mark.slow), 1.0])
def test_block_refine_is_block_refinement(threshold: float, stop: float | None) -> None:
    theirs = run(BlockRefinementScheduler(threshold=threshold), PROMPTS, confidence_threshold=stop)
    rule = {"name": "block_refine", "steps": STEPS, "threshold": threshold}
    mine = run(DllmScheduler(rule), PROMPTS, confidence_threshold=stop)
    assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


@dataclass(frozen=True)
class Drawn(CounterNoise):
    """The pipeline's order of draws: a canvas when it opens, another behind each forward. All else is counted."""

    generator: torch.Generator = field(kw_only=True)

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        if bool((canvas.age == 0).any() & (canvas.step > 0).any()):
            self._next(positions)  # behind the last forward of a canvas, for nothing
        return self._next(positions)

    def _next(self, positions: Tensor) -> Tensor:
        return torch.randint(VOCAB, positions.shape, generator=self.generator)


@dataclass(frozen=True)
class Opening(Drawn):
    """The same of a scheduler that writes noise itself: the pipeline draws a canvas, and nothing behind a forward."""

    opened: list[int] = field(default_factory=list, kw_only=True)

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        start = int(canvas.start[0])
        if start in self.opened:
            return CounterNoise.ids(self, canvas, positions, vocab)
        self.opened.append(start)
        return self._next(positions)


def seeds(seed: int) -> int:
    """What the first row's noise is seeded with: drawn behind the first canvas, without a trace."""
    generator = torch.Generator().manual_seed(seed)
    torch.randint(VOCAB, (1, LENGTH), generator=generator)
    return int(torch.randint(2**62, (1,), generator=generator))


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "block_refine", "steps": STEPS, "threshold": 1.0},
        {"name": "discrete_ddim", "max_denoising_steps": STEPS, "confidence_threshold": None},
        {
            "name": "entropy_renoise",
            "max_denoising_steps": STEPS,
            "entropy_bound": 1.0,
            "t_min": 0.4,
            "t_max": 0.8,
            "stability_threshold": None,
        },
    ],
)
def test_the_pipeline_decides_as_sampler_does(rule: Settings) -> None:
    tokens, forwards = run(DllmScheduler(rule), PROMPTS[:1], seed=3)
    draws = Opening if rule["name"] == "discrete_ddim" else Drawn
    noise = draws(begin=torch.tensor([-len(PROMPTS[0])]), generator=torch.Generator().manual_seed(3))
    sampler = Sampler(load(CHECKPOINT, device="cpu").denoiser, scheduler=rule, stop="none", noise=noise)
    expected = sampler.generate(PROMPTS[:1], max_new_tokens=2 * LENGTH, seed=seeds(3))
    assert torch.equal(tokens, expected.trace.decoded)
    assert forwards == int(expected.nfe[0]) == 2 * STEPS


def test_a_decoded_canvas_stays() -> None:
    rule = {"name": "block_refine", "steps": 2, "threshold": 1.0}
    short, long = (run(DllmScheduler(rule), PROMPTS, canvases=1, num_inference_steps=steps) for steps in (2, 5))
    assert torch.equal(short[0], long[0]) and (short[1], long[1]) == (2, 5)


def test_the_last_step_writes_what_is_left() -> None:
    rule = {"name": "block_refine", "steps": 12, "threshold": 1.0}
    with pytest.warns(UserWarning, match="scheduler=block_refine needs more steps for a block than"):
        one, _ = run(DllmScheduler(rule), PROMPTS, canvases=1, num_inference_steps=3)
    with pytest.warns(UserWarning, match="scheduler=block_refine needs more steps for a block than"):
        two, _ = run(DllmScheduler(rule), PROMPTS, canvases=1, num_inference_steps=3)
    assert torch.equal(one, two)


def test_a_scheduler_for_masks_is_refused() -> None:
    with refused("mask-token-missing: scheduler=threshold, mask_token_id"):
        run(DllmScheduler("threshold"), PROMPTS)


def test_a_pipeline_keeps_its_scheduler(tmp_path: Path) -> None:
    scheduler: Any = DllmScheduler({"name": "block_refine", "steps": STEPS, "threshold": 0.05})
    pipeline = DiffusionGemmaPipeline(model=network(), scheduler=scheduler, processor=None)
    pipeline.save_pretrained(tmp_path)
    # The model is given: diffusers 0.42 looks for its class among the pipelines, where it is not.
    again = DiffusionGemmaPipeline.from_pretrained(tmp_path, model=network(), processor=None)
    assert isinstance(again.scheduler, DllmScheduler)
    assert repr(again.scheduler) == repr(scheduler)
