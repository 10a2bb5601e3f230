"""d2Cache: against a decoder written again from the paper, its ends, and its rules by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.cache.d2 import D2Cache
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each

TOKENS, BLOCK, BAR = 17, 6, 0.7


def run(cache: Any, kind: str = "llada", rows: slice = slice(None), **plugins: Any) -> Result:
    sampler = toys.sampler(kind, cache=cache, **{"scheduler": Threshold(BAR), **plugins})
    return sampler.generate(toys.PROMPTS[rows], max_new_tokens=TOKENS, seed=toys.SEEDS[rows])


def same(one: Result, other: Result, *more: str) -> bool:
    return all(torch.equal(getattr(one.trace, name), getattr(other.trace, name)) for name in ("ids", "step_map", *more))


@dataclass
class Paper:
    """One row, sets of positions in Python, the rollout as a product of full matrices."""

    model: TransformerDenoiser
    block: int
    masks: int
    rollout: float
    sigma: float
    gap: int
    keys: list[Tensor] = field(default_factory=list)  # per layer [Hkv, L, Dh]
    values: list[Tensor] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def decode(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        first, length, back = len(prompt), len(prompt) + TOKENS, int(self.model.shift)
        ids, steps, sure = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, [0.0] * length
        columns, step, start = list(range(length)), 0, first
        while start < length:
            stop = min(start + self.block, length)
            with torch.no_grad():
                logits, importance = self.forward(ids, columns)
            self.computed.append(len(columns))
            logits[:, toys.MASK] = -torch.inf
            p = dict(zip([i + back for i in columns], logits.softmax(-1), strict=True))
            masks = [i for i in range(first, length) if steps[i - first] < 0]
            for i in masks:
                sure[i] = float(p[i].max()) if i in p else sure[i]
            open_ = [i for i in masks if i in p and start <= i < stop]
            surest = max(open_, key=lambda i: (sure[i], -i))
            fresh = [i for i in open_ if i == surest or sure[i] >= BAR]
            for i in fresh:
                ids[i], steps[i - first] = int(p[i].argmax()), step
            step += 1
            masks = [i for i in masks if i not in fresh]
            if all(steps[i - first] >= 0 for i in range(start, stop)):
                start, stop = stop, min(stop + self.block, length)
            columns = self.choose(first, length, start, stop, masks, sure, fresh, importance)
        return ids[first:], steps

    def choose(
        self, first: int, length: int, start: int, stop: int, masks: list[int], sure: list[float], fresh: list[int],
        importance: Tensor,
    ) -> list[int]:  # fmt: skip
        """Columns of the next forward."""
        until = length
        if len(masks) >= self.masks and stop > start:
            until = start + math.ceil((masks[self.masks - 1] + 1 - start) / (stop - start)) * (stop - start)
        near = [i for i in masks if i < until]
        score = {i: sure[i] * self.density(i, first, length, masks) for i in near}
        near = sorted(near, key=lambda i: (-(start <= i < stop), -score[i], i))[: self.masks]
        chosen = {i - int(self.model.shift) for i in near} | set(fresh)
        rest = sorted(set(range(length)) - chosen, key=lambda i: (-float(importance[i]), i))
        total, mass = float(importance[rest].sum()), 0.0
        for place, i in enumerate(rest):
            mass += float(importance[i]) / total
            if self.rollout > 0 and (mass <= self.rollout or place == 0 or self.rollout == 1):
                chosen.add(i)
        ordered = sorted(chosen)
        for left, right in pairwise(ordered):
            if right - left <= self.gap:
                chosen |= set(range(left, right))
        return sorted(chosen)

    def density(self, i: int, first: int, length: int, masks: list[int]) -> float:
        weight = {d: math.exp(-(d**2) / (2 * self.sigma**2)) for d in range(-3 * TOKENS, 3 * TOKENS)}
        reached = range(first - TOKENS, length + TOKENS)
        there = sum(weight[j - i] for j in reached if min(j, length - 1) not in masks)
        return there / sum(weight.values())

    def forward(self, ids: list[int], columns: list[int]) -> tuple[Tensor, Tensor]:
        net, length = self.model.transformer, len(ids)
        hidden = net.embed(torch.tensor(ids)[columns])
        rope = net.rope(torch.tensor([columns]), hidden.dtype)
        flow = torch.eye(length, dtype=torch.float64)
        for index, layer in enumerate(net.layers):
            assert isinstance(layer, Layer)
            q, k, v = (part[0] for part in layer.qkv(hidden[None], rope))
            if index == len(self.keys):
                self.keys.append(k.clone())
                self.values.append(v.clone())
            self.keys[index][:, columns], self.values[index][:, columns] = k, v
            k, v = self.keys[index], self.values[index]
            hidden = hidden + layer.attend(q[None], k[None], v[None])[0]
            hidden = hidden + layer.mlp(hidden)
            wide = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
            attention = torch.eye(length, dtype=torch.float64)
            attention[columns] = (q @ wide.mT * layer.head_dim**-0.5).softmax(-1).mean(0)
            mixed = attention + torch.eye(length, dtype=torch.float64)
            flow = mixed / mixed.sum(1, keepdim=True) @ flow
        return net.head(net.norm(hidden)), flow.sum(0)


CASES: list[dict[str, Any]] = [
    {"masks": 4, "rollout": 0.1, "sigma": 10.0, "gap": 4},
    {"masks": 3, "rollout": 0.5, "sigma": 1.0, "gap": 0},
    {"masks": 7, "rollout": 0.2, "sigma": 3.0, "gap": 2},
    {"masks": 2, "rollout": 0.0, "sigma": 2.0, "gap": 1},
    {"masks": 32, "rollout": 0.3, "sigma": 10.0, "gap": 0},
]


@pytest.mark.parametrize(
    ("case", "kind", "block"), crossed(CASES, ["llada", "gqa", "dream"], [BLOCK, TOKENS], together=0)
)
def test_it_is_its_paper(case: dict[str, Any], kind: str, block: int) -> None:
    result = run(D2Cache(**case), kind, blocks={"name": "fixed", "length": block})
    model, fewer = toys.denoiser(kind), False
    assert isinstance(model, TransformerDenoiser)
    for row, prompt in enumerate(toys.PROMPTS):
        paper = Paper(model, block, **case)
        tokens, steps = paper.decode(prompt)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == steps
        assert int(result.trace.rows[row]) == sum(paper.computed)
        fewer |= min(paper.computed) < len(prompt) + TOKENS
    assert fewer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "blocks"), crossed(toys.TOYS, {"full": "full", "fixed": {"name": "fixed", "length": BLOCK}}, together=0)
)
def test_computing_everything_is_no_cache(kind: str, blocks: Any) -> None:
    none = run("none", kind, blocks=blocks)
    assert same(run(D2Cache(masks=1, rollout=1.0), kind, blocks=blocks), none, "rows", "nfe")
    assert not same(run(D2Cache(masks=3), kind, blocks=blocks), none)


def test_tokens_taken_back_are_computed_again() -> None:
    spy = toys.Spy(toys.denoiser())
    scheduler = {"name": "editing", "threshold": 0.4, "edit": 0.2, "extra": 3}
    cache, blocks = D2Cache(masks=4, gap=0), {"name": "fixed", "length": BLOCK}
    sampler = Sampler(spy, cache=cache, scheduler=scheduler, blocks=blocks, stop="none")
    assert sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS).complete.all()
    before = spy.calls[0][0]
    for canvas, _, plan in spy.calls[1:]:
        computed = plan.wanted.computed
        wrote = (canvas.ids != before.ids) & ~canvas.done[:, None]
        assert not (wrote & ~computed).any()
        before = canvas


@each(
    ("fields", "says"),
    [
        ({"masks": 0}, "option-range: cache.masks"),
        ({"gap": -1}, "option-range: cache.gap"),
        ({"rollout": 1.5}, "option-range: cache.rollout"),
        ({"sigma": 0}, "option-range: cache.sigma"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with refused(says):
        D2Cache(**fields)
