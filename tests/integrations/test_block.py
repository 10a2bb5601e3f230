"""A scheduler in an engine of another decides what `Sampler` decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_sampler import config
from dllm_sampler.integrations.block import BlockRule
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.contract.cases import Settings, one_of_each_kind, toy_for
from tests.integrations.engine import LENGTH, PER_BLOCK, Request, serve, whole_steps
from tests.refusals import refused
from tests.sampling import crossed

# Answers end on the grid, where an engine ends them; prompts end on it and inside a block.
PROMPTS = [([5, 11, 3], 15), ([7, 1, 30, 22, 9, 14], 12), ([16, 2, 8], 9), ([4, 28, 13, 33, 2, 8, 1, 19, 5], 9)]


def causal() -> TransformerDenoiser:
    model = toys.denoiser("causal")
    assert isinstance(model, TransformerDenoiser)
    return model


def rule(scheduler: object, **options: Any) -> BlockRule:
    return BlockRule(scheduler, causal().spec, LENGTH, **options)


def served(rule: BlockRule, arrivals: list[int] | None = None) -> list[Request]:
    requests = [Request(prompt, tokens, seed) for seed, (prompt, tokens) in enumerate(PROMPTS)]
    serve(rule, causal(), requests, arrivals or [0] * len(PROMPTS))
    return requests


@pytest.mark.parametrize("scheduler", one_of_each_kind())
@pytest.mark.parametrize("temperature", [1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_engine_decides_as_sampler_does(scheduler: Settings, temperature: float | None) -> None:
    if toy_for(scheduler) == "uniform":
        with refused(f"plugins-incompatible: scheduler={scheduler['name']}"):
            rule({"name": scheduler["name"]})
        return
    if config.build("scheduler", scheduler).traits.scope == "model":  # some of these do not run on this model at all
        with refused("engine-unsupported: scheduler="):
            rule(scheduler)
        return
    mine = {**scheduler, "steps": PER_BLOCK} if "steps" in scheduler else scheduler
    traits = toys.sampler("causal", scheduler=scheduler, cache="none").plugins.scheduler.traits
    if traits.scope == "answer":
        with pytest.warns(UserWarning, match=f"scheduler={scheduler['name']} counts over an answer"):
            rule(mine)
        return
    answers = served(rule(mine, temperature=temperature), arrivals=[0, 2, 3, 0])
    for seed, ((prompt, tokens), one) in enumerate(zip(PROMPTS, answers, strict=True)):
        whole = {**mine, "steps": whole_steps(mine, len(prompt), tokens)} if "steps" in mine else mine
        sampler = toys.sampler("causal", scheduler=whole, temperature=temperature)
        alone = sampler.generate([prompt], max_new_tokens=tokens, seed=[seed])
        assert (one.answer, one.forwards) == (alone.trace.decoded[0, -tokens:].tolist(), int(alone.nfe[0]))


def test_only_rows_without_finite_logits_fail() -> None:
    mine = rule("threshold")
    ids = torch.full((3, LENGTH), toys.MASK)
    frozen = torch.zeros_like(ids, dtype=torch.bool)
    logits = torch.randn(3, LENGTH, toys.VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 2] = torch.nan
    zero = torch.zeros(3, dtype=torch.long)
    decision, _ = mine.decide(mine.open(ids, ~frozen, frozen), ids, logits, zero, zero, zero)
    assert decision.failed.tolist() == [False, True, False]
    assert decision.commit.any(1).tolist() == [True, False, True]
    assert torch.equal(decision.ids[1], ids[1])


def test_a_decided_block_stays_as_it_is() -> None:
    mine = rule({"name": "threshold", "threshold": 0.0})  # all in one forward
    ids, frozen = torch.tensor([[5, *[toys.MASK] * 5]]), torch.tensor([[True, *[False] * 5]])
    zero, logits = torch.zeros(1, dtype=torch.long), torch.randn(1, LENGTH, toys.VOCAB)
    one, state = mine.decide(mine.open(ids, ~frozen, frozen), ids, logits, zero, zero, zero)
    assert one.over.tolist() == [True] and one.settled.tolist() == [False]
    assert one.commit.tolist() == [[False, *[True] * 5]] and int(one.ids[0, 0]) == 5
    two, _ = mine.decide(state, one.ids, torch.randn_like(logits), zero, zero + 1, zero)
    assert two.settled.tolist() == [True] and torch.equal(two.ids, one.ids) and not two.commit.any()


PATTERN = "([a-j]{1,3}[0-9]-?)*[a-j]"


@pytest.mark.parametrize(
    ("scheduler", "temperature", "posterior"),
    crossed([{"name": "threshold", "threshold": 0.6}, "random_order", "klass"], [None, 1.0], [False, True], together=0),
)
def test_forms_of_answers_hold_across_blocks(scheduler: Any, temperature: float | None, posterior: bool) -> None:
    guide = {"name": "regex", "pattern": PATTERN, "posterior": posterior}
    for seed, (prompt, tokens) in enumerate(PROMPTS[:2]):
        mine = rule(scheduler, guide=guide, temperature=temperature, tokenizer=toys.tokenizer(), max_new_tokens=tokens)
        one = Request(prompt, tokens, seed)
        serve(mine, causal(), [one], [0])
        sampler = toys.sampler("causal", scheduler=scheduler, guide=guide, temperature=temperature)
        alone = sampler.generate([prompt], max_new_tokens=tokens, seed=[seed])
        assert (one.answer, one.forwards) == (alone.trace.decoded[0, -tokens:].tolist(), int(alone.nfe[0]))
        assert alone.valid is not None and alone.valid.all()


def test_forms_hold_in_a_batch_of_rows_of_different_ages() -> None:
    guide = {"name": "regex", "pattern": PATTERN}
    mine = rule("threshold", guide=guide, tokenizer=toys.tokenizer(), max_new_tokens=9)
    together = [Request(prompt, 9, seed) for seed, (prompt, tokens) in enumerate(PROMPTS) if tokens == 9]
    serve(mine, causal(), together, [0, 3])
    alone = [Request(one.prompt, 9, one.seed) for one in together]
    for one in alone:
        serve(mine, causal(), [one], [0])
    assert [one.answer for one in together] == [one.answer for one in alone]


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        ({"name": "choices", "choices": ["ab"]}, "option-missing: guide=choices"),
        ({"name": "choices", "choices": [["ab"], ["c"]]}, "engine-unsupported: guide=choices"),
        ({"name": "grammar", "grammar": "json"}, "engine-unsupported: guide=grammar"),
    ],
)
def test_forms_that_cannot_be_served_are_refused(guide: Settings, says: str) -> None:
    with refused(says):
        rule("threshold", guide=guide, tokenizer=toys.tokenizer())


def test_a_form_too_long_for_the_answer_is_refused() -> None:
    with refused("form-impossible: max_new_tokens"):
        rule("threshold", guide={"name": "regex", "pattern": "a{7}"}, tokenizer=toys.tokenizer(), max_new_tokens=2)
