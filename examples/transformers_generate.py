"""A scheduler of this library in the `generate` of transformers, for a masked-diffusion model that inherits it.

    model.generate(**inputs, max_new_tokens=64, custom_generate=diffusion, mask_token_id=tokenizer.mask_token_id)

`model(input_ids, attention_mask).logits` must be predictions for these same positions. Streamers do not work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_sampler import Sampler
from dllm_sampler.models.huggingface import MaskedLMDenoiser


def diffusion(
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    mask_token_id: int,
    scheduler: object = "threshold",
    block_length: int = 32,
    seed: int = 0,
    **inputs: Any,  # of the model: transformers passes twice what is named here too
) -> Tensor:
    """Return prompts `[B, L]` with their answers, `[B, L + max_new_tokens]`."""
    eos = generation_config.eos_token_id
    pad = eos[0] if isinstance(eos, list) else eos
    denoiser = MaskedLMDenoiser(model, mask_token_id, eos, pad)
    temperature = generation_config.temperature if generation_config.do_sample else None
    sampler = Sampler(denoiser, scheduler=scheduler, cache="none", temperature=temperature)
    prompts = [row[seen.bool()] for row, seen in zip(input_ids, inputs["attention_mask"], strict=True)]
    count = generation_config.max_length - input_ids.shape[1]
    answers = sampler.generate(prompts, max_new_tokens=count, block_length=block_length, seed=seed)
    return torch.cat([input_ids, answers.tokens.to(input_ids.device)], 1)
