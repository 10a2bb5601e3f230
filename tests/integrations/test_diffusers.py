"""A scheduler in diffusers' `LLaDA2Pipeline` 0.42 decides what `Sampler` decides."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementScheduler

from dllm_sampler import config
from dllm_sampler.errors import NotFiniteError
from tests import toys
from tests.contract.cases import Settings, one_each, one_of_each_kind, toy_for
from tests.integrations.pipelines import LENGTH, MASK, PROMPTS, TOKENS, adapter, denoiser, in_blocks, ours, quiet, run
from tests.refusals import refused

pytestmark = pytest.mark.slow


def drawn(number: int) -> tuple[torch.Generator, int]:
    """A generator, and the seed that the first row of a call takes from it."""
    seed = torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(number))
    return torch.Generator().manual_seed(number), int(seed)


@pytest.mark.parametrize("scheduler", one_of_each_kind())
@pytest.mark.parametrize("temperature", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_pipeline_decides_as_sampler_does(scheduler: Settings, temperature: float | None) -> None:
    if toy_for(scheduler) == "uniform":
        return  # this pipeline has masks
    mine, _ = in_blocks(scheduler)
    traits = config.build("scheduler", scheduler).traits
    if traits.scope == "model":
        with refused("engine-unsupported: scheduler="):
            adapter(mine)
        return
    if traits.scope == "answer":
        with pytest.warns(UserWarning, match=f"scheduler={scheduler['name']} counts over an answer"):
            adapter(mine, eos_token_id=toys.EOS)
        return
    check(scheduler, PROMPTS[:1], temperature)


@pytest.mark.parametrize("scheduler", one_each("scheduler"))
@pytest.mark.parametrize("temperature", [None, 1.0])
@pytest.mark.slow
def test_the_pipeline_decides_so_for_a_batch(scheduler: Settings, temperature: float | None) -> None:
    if config.build("scheduler", scheduler).traits.scope == "block" and toy_for(scheduler) != "uniform":
        check(scheduler, PROMPTS, temperature)


@pytest.mark.parametrize("name", ["threshold", "klass", "remdm", "random_order"])
def test_rows_of_a_batch_are_decided_alike(name: str) -> None:
    check({"name": name}, PROMPTS, 1.0)


def check(scheduler: Settings, prompts: list[list[int]], temperature: float | None) -> None:
    """The pipeline's answers, which end inside a block that is decoded whole, are those of `Sampler`."""
    mine, whole = in_blocks(scheduler)
    generator, seed = drawn(3)
    made = run(adapter(mine, temperature=temperature), prompts, tokens=TOKENS - 2, generator=generator)
    expected = ours(whole, prompts, seed, temperature=temperature)
    assert torch.equal(made.tokens, expected.trace.decoded[:, : TOKENS - 2])
    if len(prompts) == 1:
        assert made.forwards == int(expected.nfe[0])


def test_a_generator_goes_on() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (run(adapter("threshold", temperature=1.0), PROMPTS[:1], generator=generator) for _ in range(2))
    assert not torch.equal(one.tokens, two.tokens)


def test_one_scheduler_serves_call_after_call() -> None:
    mine = adapter("klass")
    first, _, again = run(mine, PROMPTS), run(mine, PROMPTS[:1], tokens=6), run(mine, PROMPTS)
    assert torch.equal(first.tokens, again.tokens) and first.forwards == again.forwards
    model, prompts = toys.denoiser("causal"), [[5, 11, 3]]
    other = run(mine, prompts, model=model, mask_token_id=toys.MASK)
    assert torch.equal(other.tokens, ours("klass", prompts, model=model).trace.decoded)


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.95])
def test_block_refinement_is_threshold(threshold: float) -> None:
    options = {"threshold": threshold, "editing_threshold": None}
    theirs = run(BlockRefinementScheduler(block_length=LENGTH), PROMPTS, **options)
    mine = run(adapter({"name": "threshold", "threshold": threshold}), PROMPTS)
    assert torch.equal(mine.tokens, theirs.tokens)
    assert mine.forwards == theirs.forwards - 3, "theirs makes a forward more for each of the three blocks"


@pytest.mark.parametrize(("threshold", "edit"), [(0.3, 0.2), (0.5, 0.3), (0.7, 0.4)])
def test_block_refinement_with_edits_is_editing(threshold: float, edit: float) -> None:
    options = {"threshold": threshold, "editing_threshold": edit, "max_post_steps": 16}
    theirs = run(BlockRefinementScheduler(block_length=LENGTH), PROMPTS[:1], **options)
    rule = {"name": "editing", "threshold": threshold, "edit": edit, "extra": 17}
    mine = run(adapter(rule), PROMPTS[:1])
    assert torch.equal(mine.tokens, theirs.tokens)
    assert mine.forwards == theirs.forwards


@pytest.mark.parametrize(
    ("scheduler", "eos"),
    [
        ("threshold", 103),
        pytest.param("fixed", 103, marks=pytest.mark.slow),
        ({"name": "editing", "threshold": 0.9, "edit": 0.7}, 285),  # end tokens come and go while a block is edited
    ],
)
def test_an_end_token_ends_a_row(scheduler: Any, eos: int) -> None:
    expected = ours(scheduler, PROMPTS, model=replace(denoiser(), eos_id=eos), stop="prefix")
    assert (expected.nfe < ours(scheduler, PROMPTS).nfe).any()
    options = {"eos_early_stop": True, "eos_token_id": eos}
    batch = run(adapter(scheduler), PROMPTS, **options)
    for row, length in enumerate(expected.lengths.tolist()):
        assert torch.equal(batch.tokens[row, :length], expected.tokens[row, :length])
        alone = run(adapter(scheduler), [PROMPTS[row]], **options)
        assert torch.equal(alone.tokens[0, :length], expected.tokens[row, :length])
        assert alone.forwards == int(expected.nfe[row])


def test_rows_that_have_ended_do_not_hold_up_others() -> None:
    options = {"eos_early_stop": True, "eos_token_id": 25}  # in the first row's first block, and nowhere else
    others = run(adapter("threshold"), PROMPTS[1:], **options)
    assert run(adapter("threshold"), PROMPTS, **options).forwards == others.forwards
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what such a row has left is not written
        run(adapter("threshold"), PROMPTS, num_inference_steps=LENGTH, **options)


def test_the_last_step_writes_what_is_left() -> None:
    with pytest.warns(UserWarning, match="scheduler=fixed needs more steps for a block than num_inference_steps=2"):
        short = run(adapter("fixed"), PROMPTS, num_inference_steps=2)
    assert short.forwards == 2 * 3 and not (short.tokens == MASK).any()


def test_settings_of_the_pipeline_are_no_settings_of_ours() -> None:
    with pytest.warns(UserWarning, match=r"DllmScheduler ignores temperature=0.5, threshold=0.9 of the pipeline"):
        told = run(adapter("threshold"), PROMPTS, temperature=0.5, threshold=0.9)
    assert torch.equal(told.tokens, run(adapter("threshold"), PROMPTS).tokens)


def test_a_guide_applies() -> None:
    eos = int(ours("fixed", PROMPTS[:1]).tokens[0, 0])
    banned = run(adapter("fixed", guide="end_tokens", eos_token_id=eos), PROMPTS)
    expected = ours("fixed", PROMPTS, model=replace(denoiser(), eos_id=eos), guide="end_tokens")
    assert torch.equal(banned.tokens, expected.trace.decoded) and not (banned.tokens == eos).any()


def test_the_mask_token_may_be_chosen_where_published_code_lets_it() -> None:
    mine, expected = run(adapter("klass", compat=True), PROMPTS), ours("klass", PROMPTS, compat=True)
    assert torch.equal(mine.tokens, expected.trace.decoded)


def test_nan_is_an_error() -> None:
    broken = toys.wrapped(toys.causal_transformer())
    torch.nn.init.constant_(broken.transformer.lm_head.weight, torch.nan)
    with pytest.raises(NotFiniteError, match="at step 1 for prompts 1, 2:"):
        run(adapter("threshold"), toys.PROMPTS[:1] * 2, model=broken, mask_token_id=toys.MASK)


@pytest.mark.parametrize("temperature", [None, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheduler", ["threshold", pytest.param("klass", marks=pytest.mark.slow)])
def test_an_answer_has_the_form_of_a_guide(scheduler: str, temperature: float | None) -> None:
    model, guide = toys.denoiser("causal"), {"name": "regex", "pattern": "([a-j]{1,3}[0-9]-?)*[a-j]"}
    mine = adapter(scheduler, guide=guide, temperature=temperature, tokenizer=toys.tokenizer(), max_new_tokens=TOKENS)
    prompts, (generator, seed) = [[16, 30, 3], [5, 11, 22]], drawn(1)  # one ends in its first block
    options = {"model": model, "mask_token_id": toys.MASK, "eos_token_id": toys.EOS, "eos_early_stop": True}
    made = run(mine, prompts, generator=generator, **options)
    given = {"stop": "prefix", "guide": guide, "temperature": temperature, "tokenizer": toys.tokenizer()}
    expected = ours(scheduler, prompts, seed, model=model, **given)
    assert expected.valid is not None and expected.valid.all()
    for row, length in enumerate(expected.lengths.tolist()):
        assert torch.equal(made.tokens[row, :length], expected.tokens[row, :length])


def test_rules_that_count_over_an_answer_run() -> None:
    made = run(quiet({"name": "certainty", "steps": 4}), PROMPTS)
    assert made.forwards == 10 and not (made.tokens == MASK).any()
