"""Fast-dLLM (arXiv 2505.22618): the invariants of its caches, against the network driven by hand.

Invariants 1 and 2 (both rules at their ends) are in test_reference.py, 7 (token names) in test_guarantees.py.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dllm_sampler import Canvas, ModelSpec, Query, Readout, Sampler
from dllm_sampler.cache.none import once
from dllm_sampler.core.packing import Pack
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.values import Edit, Spent
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer, Rope, Transformer
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
@given(
    sure=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    small=st.floats(0, 5),
    more=st.floats(0, 5),
)
def test_2_a_larger_factor_never_commits_fewer(sure: list[float], small: float, more: float) -> None:
    canvas = toys.canvas(torch.ones(1, len(sure), dtype=torch.bool))
    query = Query.masks(canvas)
    readout = Readout(
        torch.zeros(1, 1, len(sure), dtype=torch.long), torch.tensor(sure, dtype=torch.float64)[None, None]
    )
    edits: list[Edit] = [Factor(factor).tell(canvas, query, readout, None)[0] for factor in (small, small + more)]
    assert not (edits[0].commit & ~edits[1].commit).any()


class FrozenPrompt:
    """Keys and values of the prompt as the first forward computed them; the network is otherwise run in full."""

    def __init__(self, prompt: int):
        self.prompt, self.kept = prompt, {}

    def __call__(self, index: int, layer: Layer, hidden: Tensor, rope: Rope) -> Tensor:
        q, k, v = layer.qkv(hidden, rope)
        old = self.kept.setdefault(index, (k[:, :, : self.prompt], v[:, :, : self.prompt]))
        k, v = (torch.cat([was, now[:, :, self.prompt :]], 2) for was, now in zip(old, (k, v), strict=True))
        hidden = hidden + layer.attend(q, k, v)
        return hidden + layer.mlp(hidden)


def freezing_the_prompt(model: Transformer, prompt: list[int]) -> tuple[list[int], list[int]]:
    drive, start = FrozenPrompt(len(prompt)), len(prompt)
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    while -1 in step_map:
        with torch.no_grad():
            logits = model.head(model(torch.tensor([ids]), drive=drive))[0, start:]
        logits[:, toys.MASK] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        left = [i for i in range(TOKENS) if step_map[i] < 0]
        best = max(left, key=lambda i: float(sure[i]))
        for i in left:
            if i == best or sure[i] >= RULE["threshold"]:
                ids[start + i], step_map[i] = int(token[i]), step
        step += 1
    return ids[start:], step_map


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("kind", ["llada", "gqa"])
def test_3_with_one_block_only_the_prompt_is_frozen(kind: str, cache: str) -> None:
    sampler = toys.sampler(kind, scheduler=RULE, cache=cache, blocks="full")
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    model = toys.denoiser(kind)
    assert isinstance(model, TransformerDenoiser)
    for row, prompt in enumerate(toys.PROMPTS):
        tokens, step_map = freezing_the_prompt(model.transformer, prompt)
        assert result.tokens[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map
    uncached = toys.sampler(kind, scheduler=RULE, blocks="full").generate(toys.PROMPTS, max_new_tokens=TOKENS)
    assert not torch.equal(uncached.trace.generated, result.trace.generated), "freezing changed nothing here"


@dataclass(frozen=True)
class CausalAttention:
    """An entry sees its own block and earlier ones; the prompt is one block."""

    canvas: Canvas
    pack: Pack

    def groups(self, columns: Tensor, row: int) -> Tensor:
        first = self.canvas.first[row]
        return torch.where(columns < first, -1, (columns - first) // BLOCK)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, stored: tuple[Tensor, Tensor] | None) -> Tensor:
        out = torch.zeros_like(q)
        for row, end in enumerate(self.canvas.end.tolist()):
            own = ((self.pack.row == row) & (self.pack.column < self.canvas.length)).nonzero()[:, 0]
            columns, keys, values = self.pack.column[own], k[:, :, own], v[:, :, own]
            if stored is not None:
                columns = torch.arange(end)
                keys, values = (one[row, :end].transpose(0, 1)[None] for one in stored)
            sees = self.groups(columns, row) <= self.groups(self.pack.column[own], row)[:, None]
            out[:, :, own] = scaled_dot_product_attention(q[:, :, own], keys, values, sees)
        return out


@dataclass(frozen=True)
class BlockCausal:
    """A denoiser whose attention is block-causal."""

    inner: TransformerDenoiser = field(default_factory=lambda: toys.wrapped(toys.transformer()))

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        assert plan.pack is not None
        return self.inner(canvas, query, replace(plan, attention=CausalAttention(canvas, plan.pack)))

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_4_a_block_causal_model_loses_nothing_to_a_cache(cache: str) -> None:
    plugins = {"scheduler": RULE, "blocks": {"name": "fixed", "length": BLOCK}, "stop": "none"}
    exact = Sampler(BlockCausal(), **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS)
    cached = Sampler(BlockCausal(), cache=cache, **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS)
    assert torch.equal(cached.tokens, exact.tokens)
    assert torch.equal(cached.trace.generated, exact.trace.generated)
    torch.testing.assert_close(cached.trace.logprob, exact.trace.logprob)
    assert (cached.trace.rows < exact.trace.rows).all()
    # Without the causal mask the same cache does change answers: the test can fail.
    both = [
        toys.sampler("llada", cache=name, **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS)
        for name in ("none", cache)
    ]
    assert not torch.equal(both[0].trace.generated, both[1].trace.generated)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("kind", toys.TOYS)
def test_5_the_forward_that_opens_a_block_is_exact(kind: str, cache: str) -> None:
    spy, sampler = spied(kind, cache=cache)
    sampler.generate(toys.PROMPTS[1], max_new_tokens=TOKENS)
    opening = [call for call in zip(spy.calls, spy.logits, strict=True) if int(call[0][0].age) == 0]
    assert len(opening) == 4  # blocks of 5 in 16
    for (canvas, query, _), logits in opening:
        alone, plan = once(canvas, query, spy.spec)
        hidden, _ = spy.inner(alone, query, plan)
        assert torch.equal(plan.answers.spread(spy.inner.head(hidden)), logits)


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

        def drive(index: int, layer: Layer, hidden: Tensor, rope: Rope, window: Tensor = window) -> Tensor:
            q, k, v = layer.qkv(hidden, rope)
            if len(window) < k.shape[2]:
                old = tuple(was.clone() for was in stored[index])
                for was, now in zip(old, (k, v), strict=True):
                    was[:, :, window] = now[:, :, window]
                k, v = old
            stored[index] = (k, v)
            hidden = hidden + layer.attend(q, k, v)
            return hidden + layer.mlp(hidden)

        ids = torch.cat([ids, ids.masked_fill(canvas.frozen[:, :-1], toys.MASK)])
        with torch.no_grad():
            conditional, unconditional = model.head(model.transformer(ids, drive=drive))
        expected = unconditional + weight * (conditional - unconditional)
        asked = query.positions[0]
        asked = asked[asked < canvas.length]
        torch.testing.assert_close(logits[0, 0, : len(asked)], expected[asked], rtol=1e-10, atol=1e-10)
        windows += int(canvas.age) > 0
    assert windows > 3
