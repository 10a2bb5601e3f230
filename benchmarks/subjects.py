"""The models that the benchmark measures, and the generation each is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from untrained import llada, llada_157m

import dllm_sampler
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.models import fused, loading
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.sampler import Sampler

SIZES = {  # prompt, new tokens, block
    "mini": (32, 64, 32),
    "llada-157m": (128, 128, 32),
    "llada-8b": (128, 128, 32),  # on a GPU
    "smoke": (16, 32, 16),
}
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
        assert self.denoiser.mask_id is not None
        return (ids + (ids >= self.denoiser.mask_id)).to(self.network.embed.weight.device)

    def sampler(self, cache: str, steps: int) -> Sampler:
        scheduler = {"name": "fixed", "steps": steps}
        blocks = {"name": "fixed", "length": self.block}
        return Sampler(self.denoiser, scheduler=scheduler, blocks=blocks, stop="none", cache=cache)


def check(name: str, steps: int | None = None) -> None:
    """Refuse a model that cannot run here, or generate in this number of steps."""
    if name not in SIZES:
        raise unknown("model", name, SIZES)
    if name == "llada-8b" and not torch.cuda.is_available():
        raise UserError("device-missing", "llada-8b needs a GPU, and torch finds none. Choose another model.")
    _, tokens, block = SIZES[name]
    blocks = tokens // block
    if steps is not None and (steps % blocks or steps > tokens):
        raise UserError(
            "option-range",
            f"--steps {steps} does not suit {name}, which generates {tokens} tokens in {blocks} blocks. Set a"
            f" multiple of {blocks}, at most {tokens}.",
        )


def subject(name: str) -> Subject:
    """A model by name: the shipped `mini`, or random weights of a shape.

    Raises:
        UserError: see `check`.
    """
    check(name)
    weights = "random"
    if name == "mini" and (MINI / "model.safetensors").exists():
        denoiser, weights = loading.load(MINI, device="cpu").denoiser, "checkpoint"
        assert isinstance(denoiser, TransformerDenoiser)
    elif name == "mini":
        denoiser = llada(160, 128, 352, 5, 4)
    elif name == "smoke":
        denoiser = llada(640, 64, 128, 2, 4)
    elif name == "llada-157m":
        denoiser = llada_157m()
    else:
        denoiser = llada(126464, 4096, 12288, 32, 32, "cuda", torch.bfloat16)
        fused.join(denoiser.transformer)  # as `from_pretrained` does
    return Subject(denoiser, weights, *SIZES[name])
