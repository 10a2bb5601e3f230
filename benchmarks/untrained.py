"""LLaDA's layout with random weights: models of any size whose cost is real, though their answers mean nothing."""

from __future__ import annotations

import torch

from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer, TransformerConfig


def llada(
    vocabulary: int,
    width: int,
    feed_forward: int,
    layers: int,
    heads: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TransformerDenoiser:
    """A model of that shape, the same at each call; token 0 ends texts, token 1 is the mask."""
    config = TransformerConfig(vocabulary, width, feed_forward, layers, heads, heads, width // heads)
    with torch.device(device):
        model = Transformer(config).to(dtype)
        # Wide weights: at the usual 0.02 every mask gets the same prediction, and equal tokens would prove little.
        generator = torch.Generator(device).manual_seed(0)
        model.init_weights(std=2 / config.hidden_size**0.5, embedding_std=1.0, generator=generator)
    return TransformerDenoiser(model.eval(), mask_id=1, eos_id=0)


def llada_157m() -> TransformerDenoiser:
    """157 million parameters, most of them the words of LLaDA's vocabulary."""
    return llada(126464, 512, 1536, 8, 8)
