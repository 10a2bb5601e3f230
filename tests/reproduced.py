"""The oracle of one token per step: the same answers, in as few forwards as it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.eval.oracle import Oracle
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps


def decode(
    denoiser: Denoiser,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    seed: int = 0,
    tokenizer: Any = None,
    **plugins: Any,
) -> tuple[Result, Result]:
    """Both results of a batch. `plugins` are the same for both, and greedy."""
    reference = Sampler(denoiser, scheduler=FixedSteps(), tokenizer=tokenizer, **plugins)
    one_by_one = reference.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)
    oracle = Sampler(denoiser, scheduler=Oracle.of(one_by_one.trace), tokenizer=tokenizer, **plugins)
    return one_by_one, oracle.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)
