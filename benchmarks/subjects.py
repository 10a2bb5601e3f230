"""The models that the benchmark measures, and the generation each is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dllm_sampler
from dllm_sampler.eval.untrained import llada, llada_157m
from dllm_sampler.models import loading
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.sampler import Sampler

MINI = Path(dllm_sampler.__file__).parent / "models" / "mini"


@dataclass(frozen=True)
class Subject:
    """A model and the generation it is measured on."""

    denoiser: TransformerDenoiser
    weights: str  # "random" or "checkpoint"
    prompt: int
    new_tokens: int
    block: int

    @property
    def network(self) -> Transformer:
        return self.denoiser.transformer

    def prompts(self, batch: int) -> Tensor:
        """`[batch, prompt]` random words, never the mask."""
        generator = torch.Generator().manual_seed(1)
        size = self.network.config.vocab_size - 1
        ids = torch.randint(size, (batch, self.prompt), generator=generator)
        return (ids + (ids >= self.denoiser.mask_id)).to(self.network.embed.weight.device)

    def sampler(self, cache: str, steps: int) -> Sampler:
        scheduler = {"name": "fixed", "steps": steps}
        blocks = {"name": "fixed", "length": self.block}
        return Sampler(self.denoiser, scheduler=scheduler, blocks=blocks, stop="none", cache=cache)


def subject(name: str) -> Subject:
    """A model by name: the shipped `mini`, or random weights of a shape."""
    if name == "mini" and (MINI / "model.safetensors").exists():
        denoiser = loading.load(MINI, device="cpu").denoiser
        assert isinstance(denoiser, TransformerDenoiser)
        return Subject(denoiser, "checkpoint", prompt=32, new_tokens=64, block=32)
    if name == "mini":
        return Subject(llada(160, 128, 352, 5, 4), "random", prompt=32, new_tokens=64, block=32)
    if name == "smoke":
        return Subject(llada(640, 64, 128, 2, 4), "random", prompt=16, new_tokens=32, block=16)
    if name == "llada-157m":
        return Subject(llada_157m(), "random", prompt=128, new_tokens=128, block=32)
    if name == "llada-8b":
        denoiser = llada(126464, 4096, 12288, 32, 32, "cuda", torch.bfloat16)
        return Subject(denoiser, "random", prompt=128, new_tokens=128, block=32)
    raise SystemExit(f"unknown model {name!r}: choose among mini, llada-157m, llada-8b (needs a GPU), smoke")
