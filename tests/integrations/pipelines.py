"""diffusers' own pipelines around tiny checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dllm_sampler import Result, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.integrations.diffusers import DllmScheduler
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.loading import load
from tests import toys
from tests.contract.cases import Settings
from tests.integrations.engine import PER_BLOCK, whole_steps

DATA = Path(__file__).parents[1] / "conformance" / "data"
LENGTH, MASK = toys.FILTER_BLOCK, 286
# One batch: diffusers pads prompts of different lengths on the left, where blocks would begin elsewhere.
PROMPTS = [[42, 30, 222], [148, 190, 168], [124, 150, 209]]
TOKENS = 15  # the last block ends with them


@cache
def denoiser() -> TransformerDenoiser:
    """LLaDA2's checkpoint in float64, and surer of itself: no probability of it would reach a usual threshold."""
    loaded = load(DATA / "tiny-llada2-moe", device="cpu", mask_id=MASK, dtype=torch.float64).denoiser
    assert isinstance(loaded, TransformerDenoiser)
    with torch.no_grad():
        loaded.transformer.lm_head.weight *= 3
    return loaded


class Network(nn.Module):
    """LLaDA2's network with the call that `LLaDA2Pipeline` makes. Each position sees its block and those before it."""

    device = torch.device("cpu")

    def __init__(self, model: TransformerDenoiser) -> None:
        super().__init__()
        self.calls, self.transformer = 0, model.transformer

    def forward(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> SimpleNamespace:
        self.calls += 1
        at = position_ids[:1]
        return SimpleNamespace(logits=self.transformer(ids, keys=block_causal(at, at, LENGTH)))


@dataclass(frozen=True)
class Run:
    """What a pipeline returned, and the forwards it made."""

    tokens: Tensor
    forwards: int


def run(scheduler: Any, prompts: list[list[int]], *, tokens: int = TOKENS, model: Any = None, **options: Any) -> Run:
    """An answer of `LLaDA2Pipeline` 0.42, with as many steps per block as a scheduler may take."""
    from diffusers.pipelines.llada2.pipeline_llada2 import LLaDA2Pipeline  # half of diffusers

    network = Network(model or denoiser())
    pipeline = LLaDA2Pipeline(model=network, scheduler=scheduler, tokenizer=None)
    pipeline.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 64, "eos_early_stop": False, "block_length": LENGTH, "mask_token_id": MASK}
    given |= {"input_ids": torch.tensor(prompts), "gen_length": tokens, "output_type": "seq"}
    out = pipeline(**given | options)
    assert not isinstance(out, tuple)
    return Run(torch.as_tensor(out.sequences), network.calls)


def adapter(scheduler: Any, **options: Any) -> DllmScheduler:
    """For blocks of `LENGTH`."""
    return DllmScheduler(scheduler, **{"block_length": LENGTH, **options})


def ours(scheduler: Any, prompts: list[list[int]], seed: int = 0, model: Any = None, **plugins: Any) -> Result:
    """The answer of `Sampler`."""
    given = {"blocks": FixedBlocks(LENGTH), "stop": "none", "cache": "none", **plugins}
    return Sampler(model or denoiser(), scheduler=scheduler, **given).generate(
        prompts, max_new_tokens=TOKENS, seed=seed
    )


def in_blocks(scheduler: Settings) -> tuple[Settings, Settings]:
    """The settings for an engine with `PER_BLOCK` forwards in a block, and for `Sampler` with as many."""
    if (
        scheduler["name"] == "editing" and "remask" in scheduler
    ):  # the pipeline makes at most `gen_length` forwards in a block
        scheduler = {**scheduler, "remask_limit": 1, "extra": 1}
    if "steps" not in scheduler:
        return scheduler, scheduler
    return {**scheduler, "steps": PER_BLOCK}, {**scheduler, "steps": whole_steps(scheduler, len(PROMPTS[0]), TOKENS)}


def quiet(scheduler: Any, **options: Any) -> DllmScheduler:
    """An adapter whose warning has been looked at elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adapter(scheduler, **options)
