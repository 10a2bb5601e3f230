"""Fast-dLLM (arXiv 2505.22618): the invariants of its caches, against the network driven by hand.

Invariants 1 and 2 (both rules at their ends) are in test_reference.py, 4 (block-causal models) in test_block_causal.py,
7 (token names) in test_guarantees.py.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler import Query, Readout, Sampler
from dllm_sampler.cache.none import once
from dllm_sampler.core.values import Edit
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer, Rope
from dllm_sampler.schedulers.factor import Factor
from tests import toys

TOKENS, BLOCK = 16, 5
RULE = {"name": "threshold", "threshold": 0.8}


def spied(kind: str, **plugins: Any) -> tuple[toys.Spy, Sampler]:
    spy = toys.Spy(toys.denoiser(kind))
    return spy, Sampler(
        spy, **{"scheduler": RULE, "blocks": {"name": "fixed", "length": BLOCK}, "stop": "none", **plugins}
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sure=st.lists(st.floats(0, 1), min_size=1, max_size=8), small=st.floats(0, 5), more=st.floats(0, 5))
def test_2_a_larger_factor_never_commits_fewer(sure: list[float], small: float, more: float) -> None:
    canvas = toys.canvas(torch.ones(1, len(sure), dtype=torch.bool))
    query = Query.masks(canvas)
    readout = Readout(
        torch.zeros(1, 1, len(sure), dtype=torch.long), torch.tensor(sure, dtype=torch.float64)[None, None]
    )
    edits: list[Edit] = [Factor(factor).tell(canvas, query, readout, None)[0] for factor in (small, small + more)]
    assert not (edits[0].commit & ~edits[1].commit).any()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("kind", toys.TOYS)
def test_5_the_forward_that_opens_a_block_is_exact(kind: str, cache: str) -> None:
    spy, sampler = spied(kind, cache=cache)
    sampler.generate(toys.PROMPTS[1], max_new_tokens=TOKENS)
    opening = [call for call in zip(spy.calls, spy.logits, strict=True) if int(call[0][0].age) == 0]
    assert len(opening) == 4  # blocks of 5 in 16
    for (canvas, query, _), logits in opening:
        plan = once(canvas, query, spy.spec)
        hidden, _ = spy.inner(canvas, query, plan)
        assert torch.equal(plan.head_rows.spread(spy.inner.head(hidden)), logits)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("kind", toys.TOYS)
def test_6_one_full_forward_per_block_and_windows_between(kind: str, cache: str) -> None:
    spy, sampler = spied(kind, cache=cache)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    back, branches = int(kind == "dream"), 2 if kind == "cfg" else 1
    for row, prompt in enumerate(toys.PROMPTS):
        full, total = len(prompt) + TOKENS, 0
        steps = result.trace.steps(row)
        assert sum(map(len, steps)) == TOKENS
        for number, committed in enumerate(steps):
            start = committed[0] // BLOCK * BLOCK
            opens = number == 0 or steps[number - 1][0] // BLOCK * BLOCK != start
            stop = TOKENS if cache == "prefix" else min(start + BLOCK, TOKENS)
            expected = full if opens else stop - start + back
            assert spy.computed[number][row] == expected
            total += expected
        assert int(result.trace.rows[row]) == branches * total


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("kind", ["gqa", "cfg"])
def test_a_window_sees_what_the_opening_forward_stored(kind: str, cache: str) -> None:
    """Every windowed forward equals the plain network whose keys and values outside the window are the stored ones.

    Under guidance each branch stores its own: here they are two rows of one batch.
    """
    spy, sampler = spied(kind, cache=cache)
    prompt = toys.PROMPTS[1]
    sampler.generate(prompt, max_new_tokens=TOKENS)
    model, weight = spy.inner, 1.0
    if isinstance(model, GuidedDenoiser):
        model, weight = model.denoiser, model.scale + 1
    assert isinstance(model, TransformerDenoiser)
    stored: dict[int, tuple[Tensor, Tensor]] = {}
    windows = 0
    for (canvas, query, plan), logits in zip(spy.calls, spy.logits, strict=True):
        ids, window = canvas.ids[:, :-1], torch.tensor(toys.columns(plan)[0])

        def drive(
            index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None, window: Tensor = window
        ) -> Tensor:
            q, k, v = layer.qkv(hidden, rope)
            if len(window) < k.shape[2]:
                old = tuple(was.clone() for was in stored[index])
                for was, now in zip(old, (k, v), strict=True):
                    was[:, :, window] = now[:, :, window]
                k, v = old
            stored[index] = (k, v)
            hidden = hidden + layer.attend(q, k, v)
            return hidden + layer.mlp(hidden)

        ids = torch.cat([ids, ids.masked_fill(canvas.layout.frozen[:, :-1], toys.MASK)])
        with torch.no_grad():
            conditional, unconditional = model.head(model.transformer(ids, drive=drive))
        expected = unconditional + weight * (conditional - unconditional)
        asked = query.positions[0]
        asked = asked[asked < canvas.length]
        torch.testing.assert_close(logits[0, 0, : len(asked)], expected[asked], rtol=1e-10, atol=1e-10)
        windows += int(canvas.age) > 0
    assert windows > 3
