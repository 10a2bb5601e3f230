"""The recipe for `generate` of transformers, examples/transformers_generate.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from tests import toys

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("scheduler", ["threshold", {"name": "fixed", "steps": 4}])
def test_generate_answers_as_sampler_does(
    scheduler: Any, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    diffusion = import_module("transformers_generate").diffusion
    ids = torch.tensor([[toys.EOS, toys.EOS, 5, 11, 3], [7, 1, 30, 22, 9]])  # padded on the left, as transformers does
    draws = {} if temperature is None else {"do_sample": True, "temperature": temperature}
    made = toys.verifier().generate(
        ids,
        attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        max_new_tokens=9,
        custom_generate=diffusion,
        eos_token_id=toys.EOS,
        mask_token_id=toys.MASK,
        scheduler=scheduler,
        block_length=4,
        seed=3,
        **draws,
    )
    denoiser = MaskedLMDenoiser(toys.verifier(), toys.MASK, toys.EOS, toys.EOS)
    sampler = Sampler(denoiser, scheduler=scheduler, cache="none", temperature=temperature)
    expected = sampler.generate([[5, 11, 3], [7, 1, 30, 22, 9]], max_new_tokens=9, block_length=4, seed=3)
    assert torch.equal(made, torch.cat([ids, expected.tokens], 1))
