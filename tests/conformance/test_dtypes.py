"""Every family answers in every dtype: float64 as float32, half precision nearly so."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dllm_sampler import Query, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.engine import layout
from dllm_sampler.models.loading import load
from tests import toys
from tests.sampling import crossed

DATA = Path(__file__).parent / "data"
FEW = {"name": "fixed", "steps": 4}
SCHEDULERS = {"tiny-diffusion-gemma": {"name": "entropy_renoise", "max_denoising_steps": 4}}
FAMILIES = [
    *("tiny-llada", "tiny-llada-gqa", "tiny-illada", "tiny-dream", "tiny-sdar", "tiny-sdar-moe", "tiny-fast-dllm-v2"),
    *(
        "tiny-nemotron-labs-diffusion",
        "tiny-stable-diffcoder",
        "tiny-llada-moe",
        "tiny-llada2-moe",
        "tiny-llada2.2-moe",
        "tiny-a2d-qwen3",
        "tiny-rnd1",
        *SCHEDULERS,
    ),
]
CLOSE = {torch.float64: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}  # of the logits, relative to their size
PROMPTS = [[103, 22, 80, 12], [101, 22]]


@cache
def sampler(name: str, dtype: torch.dtype) -> Sampler:
    named = None if name in SCHEDULERS else 198
    denoiser = load(DATA / name, dtype=dtype, device="cpu", mask_id=named).denoiser
    return Sampler(denoiser, scheduler=SCHEDULERS.get(name, FEW), stop="none")


def logits(name: str, dtype: torch.dtype) -> Tensor:
    """`[B, Q, V]` what the first forward says of the first block."""
    denoiser = sampler(name, dtype).denoiser
    spec = denoiser.spec
    blocks = FixedBlocks(16).bind(toys.context(spec))
    canvas = layout.canvas(PROMPTS, 16, [0, 0], spec, blocks, CounterNoise(), False)
    if spec.mask_id is None:
        canvas = canvas.renoised(spec.vocab_size)
    plan = toys.planned(canvas, Query.window(canvas), spec, NoCache().init(canvas, spec))
    hidden, _ = denoiser(canvas, plan.wanted.query, plan)
    return plan.head_rows.spread(denoiser.head(hidden))[:, 0]


@pytest.mark.parametrize(("name", "dtype"), crossed(FAMILIES, list(CLOSE)))
def test_logits(name: str, dtype: torch.dtype):
    found, plain = logits(name, dtype), logits(name, torch.float32)
    assert found.isfinite().all()
    assert (found.double() - plain.double()).norm() <= CLOSE[dtype] * plain.double().norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_in_a_batch_is_the_row_alone_in_float64(name: str):
    batch = sampler(name, torch.float64).generate(PROMPTS, max_new_tokens=24, seed=0)
    alone = sampler(name, torch.float64).generate(PROMPTS[1:], max_new_tokens=24, seed=1)  # the one that is padded
    assert torch.equal(alone.tokens[0], batch.tokens[1])
    assert torch.equal(alone.trace.generated[0], batch.trace.generated[1])


@pytest.mark.parametrize(("name", "dtype"), crossed(FAMILIES, [torch.float16, torch.bfloat16], together=0))
def test_half_precision_generates(name: str, dtype: torch.dtype):
    assert sampler(name, dtype).generate(PROMPTS, max_new_tokens=16).complete.all()
