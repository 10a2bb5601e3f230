"""D2F (arXiv 2508.09192): its cache, and its rule on blocks that are open one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler.cache.d2f import D2FCache
from dllm_sampler.core.values import Canvas
from dllm_sampler.schedulers.d2f import D2F
from dllm_sampler.schedulers.lopa import LoPA
from tests import toys
from tests.sampling import few
from tests.unit.test_schedulers_lopa import PIPELINE, TOKENS, run, same


class Everything(D2FCache):
    """Computes all columns in each forward."""

    def computes(self, canvas: Canvas) -> Tensor:
        return canvas.seen()

    def recalled(self, canvas: Canvas) -> None:
        return None

    def restore(self, hidden: Tensor, plan: Any) -> Tensor:
        self.made = plan, hidden
        return hidden


@few("toy", ["llada", "dream", "cfg"])
def test_block_causal_attention_makes_the_cache_exact(toy: str) -> None:
    """Invariant 5; with full attention what is stored is stale."""
    for attention in ("block_causal", "full"):
        for scheduler in (D2F(0.7), LoPA(D2F(0.7))):
            stored = run(scheduler, toy, cache=D2FCache(attention))
            computed = run(scheduler, toy, cache=Everything(attention))
            if attention == "full":
                assert not same(stored, computed)
                continue
            assert same(stored, computed) and torch.equal(stored.nfe, computed.nfe)
            assert bool((stored.trace.rows < computed.trace.rows).all())


@few("steps", [None, 7])
def test_a_forward_that_did_not_ask_about_the_edge_computes_its_row_again(steps: int | None) -> None:
    """Under a logit shift: `random_order` asks about what it commits alone, seldom the first position of a block."""
    rule = {"name": "random_order", "steps": steps}
    stored = run(rule, "dream", blocks="fixed", cache=D2FCache("block_causal"))
    computed = run(rule, "dream", blocks="fixed", cache=Everything("block_causal"))
    assert same(stored, computed)
    assert torch.allclose(stored.trace.logprob, computed.trace.logprob, rtol=0, atol=1e-9)


@few("score", ["entropy", "margin", "confidence"])
def test_a_fixed_block_gets_its_best_mask_where_no_other_is_sure(score: str) -> None:
    """As where one of several blocks is open at a time."""
    rule, one = {"name": "d2f", "threshold": 0.6, "score": score}, PIPELINE | {"name": "multi_block"}
    fixed = run(rule, blocks={"name": "fixed", "length": 4})
    assert same(fixed, run(rule, blocks=one | {"add_threshold": 1.0}))


@pytest.mark.slow
def test_one_block_at_a_time_is_a_threshold() -> None:
    """Invariant 6: the canvas is cut at the block's end."""
    blocks = PIPELINE | {"add_threshold": 1.0, "full_threshold": 1.0}
    piped = run({"name": "d2f", "threshold": 0.7, "score": "confidence"}, blocks=blocks)
    for row, prompt in enumerate(toys.PROMPTS):
        text, written = list(prompt), (piped.trace.generated[row] >= 0)
        count = int(written.sum())
        while len(text) < len(prompt) + count:
            sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.7}, blocks="full")
            size = min(4, len(prompt) + TOKENS - len(text))
            text += sampler.generate([text], max_new_tokens=size).trace.ids[0, len(text) :].tolist()
        assert text[len(prompt) :] == piped.trace.ids[row, piped.trace.origin :][written].tolist()
