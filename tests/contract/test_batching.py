"""A row of a ragged batch comes out as if it were alone: tokens, forwards, step map, rows computed."""

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dllm_sampler import UserError
from dllm_sampler.check.promises import check_row, check_rows
from tests import toys
from tests.contract import cases
from tests.contract.cases import CASES, Case, thinned


@pytest.mark.parametrize("case", thinned(CASES))
def test_a_row_in_a_batch_is_the_row_alone(case: Case) -> None:
    check_rows(case, [len(case.id) % len(toys.PROMPTS)])  # by turns


def test_an_infinite_gap_says_nothing() -> None:
    """A distribution truncated to one token has one, also at positions that only fill up a wider batch."""
    measures = {"name": "top_p", "p": 0.7, "measured": True}
    stop, blocks = {"name": "prophet", "early": 2.0, "mid": 1.5, "late": 1.0}, {"name": "fixed", "length": 6}
    case = Case("cfg", {"name": "remdm"}, {"name": "dual"}, blocks, stop, measures)
    assert (case.result.nfe > 1).all()
    check_rows(case, [1, 2, 3])


@pytest.mark.parametrize(
    "cache",
    [
        {"name": "d2", "masks": 4, "rollout": 0.8},
        {"name": "elastic", "window": 3, "track": 2, "gamma": 0.99, "full_every": 5},
    ],
)
def test_hidden_columns_keep_what_is_stored_of_them(cache) -> None:
    """A row in a fast phase of SlowFast hides columns; when it sees them again, its neighbours are not felt."""
    scheduler = {"name": "slowfast", "threshold": 0.7, "glimpse": 0.1, "slow": 2}
    for length in (5, 11):
        sampler = toys.sampler("gqa", scheduler=scheduler, cache=cache, blocks={"name": "fixed", "length": length})
        prompts = [[5, 2, 2, 16, 11], [7], [5, 19]]
        batch = sampler.generate(prompts, max_new_tokens=12)
        for row, prompt in enumerate(prompts):
            check_row(batch, row, sampler.generate([prompt], max_new_tokens=12))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    toy=st.sampled_from(toys.TOYS),
    plugins=st.fixed_dictionaries(
        {group: st.sampled_from(cases.settings(group)) for group in ("scheduler", "cache", "stop")}
    ),
    guides=st.lists(st.sampled_from(cases.settings("guide")), max_size=2),
    length=st.integers(1, 12),
    tokens=st.integers(1, 12),
    prompts=st.lists(st.lists(st.integers(0, toys.EOT), min_size=1, max_size=9), min_size=2, max_size=4),
    seed=st.integers(-(2**62), 2**62),
)
def test_whatever_the_prompts_and_settings(toy, plugins, guides, length, tokens, prompts, seed) -> None:
    # A guide that only truncates the choice is refused without a temperature.
    guides = [{"name": "temperature", "value": 0.9}, *guides]
    try:
        sampler = toys.sampler(toy, **plugins, guide=guides, blocks={"name": "fixed", "length": length})
    except UserError:
        reject()
    seeds = [seed + 3 * row for row in range(len(prompts))]
    batch = sampler.generate(prompts, max_new_tokens=tokens, seed=seeds)
    for row, prompt in enumerate(prompts):
        check_row(batch, row, sampler.generate([prompt], max_new_tokens=tokens, seed=[seeds[row]]))
