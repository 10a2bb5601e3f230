"""DEER: the target's own text, whatever drafts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import NotFiniteError, Sampler, UserError
from dllm_sampler.deer import SpeculativeSampler
from tests import toys

PROMPTS = [
    torch.randint(0, toys.VOCAB - 1, (length,), generator=torch.Generator().manual_seed(i)).tolist()
    for i, length in enumerate(torch.randint(1, 12, (150,), generator=torch.Generator().manual_seed(0)).tolist())
]


def deer(kind: str = "llada", k: int = 5, target: Any = None, **settings: Any) -> SpeculativeSampler:
    own = {name: settings.pop(name) for name in ("scheduled", "separator") if name in settings}
    drafter = Sampler(toys.denoiser(kind), **settings)
    return SpeculativeSampler(drafter, toys.verifier() if target is None else target, draft_length=k, **own)


@torch.no_grad()
def greedy(prompt: list[int], new: int, target: Any = None, ends: tuple[int, ...] = (toys.EOS,)) -> list[int]:
    """Plain autoregressive decoding, one full forward per token."""
    ids, model = list(prompt), toys.verifier() if target is None else target
    while len(ids) < len(prompt) + new and not (len(ids) > len(prompt) and ids[-1] in ends):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(result: Any) -> list[list[int]]:
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("k", [0, 1, 2, 5, 32])
def test_greedy_text_is_the_targets(k: int) -> None:
    """For 150 ragged prompts in one batch; emitted per round in 1..k+1, one pass of the target per round."""
    target = toys.verifier()
    calls: list[int] = []
    hook = target.register_forward_hook(lambda *_: calls.append(1))
    result = deer(k=k).generate(PROMPTS, max_new_tokens=12)
    hook.remove()
    assert answers(result) == [greedy(prompt, 12) for prompt in PROMPTS]
    assert len(calls) == result.accepted.shape[1] == int(result.nfe.max())
    assert result.complete.all()
    emitted = torch.stack([(result.step_map == one).sum(1) for one in range(1, len(calls) + 1)], 1)
    live = result.accepted >= 0
    assert (emitted[live] >= 1).all()
    assert (emitted[live] <= k + 1).all()
    assert (emitted[~live] == 0).all()
    assert (result.accepted[live] <= emitted[live]).all()
    if k == 0:
        assert torch.equal(result.nfe, result.lengths)
        assert int(result.drafting.sum()) == 0


@pytest.mark.parametrize("kind", ["gqa", "dream", "cfg", "causal"])
def test_any_drafter(kind: str) -> None:
    result = deer(kind, blocks={"name": "fixed", "length": 4}).generate(PROMPTS[:40], max_new_tokens=10)
    assert answers(result) == [greedy(prompt, 10) for prompt in PROMPTS[:40]]
