"""Answers of which tokens are given: these never change, the rest comes out as in any batch, and all of it ends."""

from __future__ import annotations

import functools
import warnings
from random import Random
from typing import Any

import pytest
import torch

from dllm_sampler import Commits, Infill, Result
from dllm_sampler.check.promises import check_row
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.core.values import FREE
from dllm_sampler.engine import layout
from dllm_sampler.kernels.backend import FallbackWarning
from tests import toys
from tests.contract.cases import CASES, TOKENS, Case, thinned
from tests.contract.test_in_flight import JOINS
from tests.contract.test_recorded import same
from tests.sampling import sampled
from tests.taped import pair

SERVED = [case for case in CASES if not case.facts["moves"]]  # others are refused, see test_lengths
ROWS = len(toys.PROMPTS)
ENDED = {"end", "length"}
FORMS = ("regex", "choices", "json_schema")


@functools.cache
def given(case: Case) -> list[list[int]]:
    """Tokens of each toy prompt's answer, by chance: under a guide those of an answer that it allows.

    A block-causal model, and a verifier that reads from left to right, get beginnings only. The first row has none.
    """
    random, before = Random(case.id), None
    if case.guide["name"] in (*FORMS, "grammar"):
        before = case.generate([*range(ROWS)])
    rows = [[FREE] * TOKENS]
    for row in range(1, ROWS):
        size = random.randint(1, TOKENS - 1)
        known = [random.choice([one for one in range(30) if one != toys.EOT]) for _ in range(TOKENS)]
        if before is not None:
            known = before.tokens[row, : int(before.lengths[row])].tolist()
        places = random.sample(range(TOKENS), size)
        if case.toy in ("causal", "context") or case.scheduler["name"] == "apd":
            places = list(range(size))
        inner = [at for at in places if at < len(known) and known[at] != toys.EOS]
        answer = [known[at] if at in inner else FREE for at in range(TOKENS)]
        rows.append(answer if FREE in answer else [FREE] * TOKENS)
    return rows


def stream(case: Case) -> list[Commits]:
    sampler = toys.sampler(case.toy, **case.plugins)
    return list(sampler.stream(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS, pinned=given(case)))


def alone(case: Case, row: int) -> Result:
    sampler = toys.sampler(case.toy, **case.plugins)
    return sampler.generate(
        [toys.PROMPTS[row]], max_new_tokens=TOKENS, seed=[toys.SEEDS[row]], pinned=[given(case)[row]]
    )


@pytest.mark.parametrize("case", thinned(SERVED, "cache"))
def test_given_tokens_stand_and_all_else_is_as_ever(case: Case) -> None:
    pinned = torch.tensor(given(case))
    known, steps = pinned != FREE, stream(case)
    for commits in steps:
        assert torch.equal(commits.tokens[known], pinned[known]) and not commits.masked[known].any()
        assert (commits.step_map[known] == -1).all()
        assert torch.equal(torch.zeros_like(known) if commits.given is None else commits.given, known)
    result = steps[-1].result
    assert result is not None
    last = torch.where(known, torch.arange(TOKENS) + 1, 0).amax(1)
    for row, reason in enumerate(result.finish_reason):
        until = int(result.lengths[row])
        if reason in ENDED:
            assert not steps[-1].masked[row, :until].any()
            assert until >= last[row], "it ended before a given token"
        else:
            assert reason == "constraint" and case.guide["name"] == "grammar"
        if result.valid is not None and reason in ENDED:
            assert result.valid[row]
    assert int(result.nfe.max()) <= case.sampler.plugins.bound(TOKENS)
    assert torch.equal(
        result.generated, ((result.step_map >= 0) & (torch.arange(TOKENS) < result.lengths[:, None])).sum(1)
    )
    row = len(case.id) % ROWS
    if row:
        check_row(result, row, alone(case, row))
    else:  # a row without a given token is not touched by its neighbours'
        check_row(result, 0, case.generate([0]))


@pytest.mark.parametrize("case", thinned([case for case in JOINS if not case.facts["moves"]], "blocks"))
def test_in_flight(case: Case) -> None:
    random = Random(case.id)
    order = [random.randrange(ROWS) for _ in range(3)] + [1]
    sampler = toys.sampler(case.toy, **case.plugins)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "seed": [toys.SEEDS[row] for row in order]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)  # they join
        answers = list(
            sampler.generate_many(
                [toys.PROMPTS[row] for row in order],
                pinned=[given(case)[row] for row in order],
                batch_size=random.choice([1, 2, 3]),
                **options,
            )
        )
    for answer in answers[-1:]:
        own = alone(case, order[answer.index])
        assert torch.equal(answer.tokens, own.tokens[0])
        assert answer.trace is not None and torch.equal(answer.trace.generated, own.trace.generated)
        assert (answer.nfe, answer.length) == (int(own.nfe[0]), int(own.lengths[0]))


# An answer that has a form may lose it when its length changes.
ALONE = [case for case in SERVED if case.toy != "causal" and case.guide["name"] not in (*FORMS, "grammar")]


@pytest.mark.parametrize("case", thinned(ALONE, "blocks"))
def test_without_a_prompt(case: Case) -> None:
    """Answers that stand alone, of their own lengths; what an earlier block needs is there without a prompt."""
    random = Random(case.id)
    rows = []
    for row in range(1, ROWS):
        answer = given(case)[row][: random.choice([8, 9, TOKENS])]
        answer[0] = answer[0] if answer[0] != FREE else (case.guide["name"] == "none") * 4 or FREE
        if {FREE} < {*answer} and (answer[0] != FREE or case.toy != "dream"):
            rows.append(Infill(answer))
    if not rows:
        return
    sampler = toys.sampler(case.toy, **case.plugins)
    batch = sampler.generate(rows, seed=5)
    for row, ask in list(enumerate(rows))[-1:]:
        assert isinstance(ask.answer, list)
        own, pinned = sampler.generate(ask, seed=5 + row), torch.tensor(ask.answer)
        size, known = len(pinned), pinned != FREE
        assert torch.equal(own.tokens[0, known], pinned[known])
        assert torch.equal(batch.tokens[row, :size], own.tokens[0]) and batch.nfe[row] == own.nfe[0]
        assert torch.equal(batch.step_map[row, :size], own.step_map[0]) and batch.trace.rows[row] == own.trace.rows[0]


@pytest.mark.parametrize(
    "plugins",
    sampled(
        [
            {"cache": "none", "temperature": 0.8},
            {"cache": "dual", "scheduler": {"name": "editing", "threshold": 0.5, "edit": 0.3}},
            {"cache": "prefix", "guide": {"name": "regex", "pattern": "([a-j][0-9]?)*"}},
        ]
    ),
)
def test_recorded_steps(plugins: dict[str, Any]) -> None:
    """Generations with and without given tokens take turns on the same buffers."""
    plain, it, engine = pair(**plugins)
    rows = [[FREE, FREE, 2, 3, FREE, 1, FREE], [4, FREE, FREE, FREE, FREE, FREE, 10]]
    others = [[FREE, 5, FREE, FREE, FREE, FREE, 6], [FREE, FREE, 7, FREE, 8, FREE, FREE]]
    for pinned in (rows, None, others, rows):
        same(*(one.generate([[5, 11], [16]], max_new_tokens=11, pinned=pinned, seed=1) for one in (it, plain)))
    assert engine.replays > 0


def test_a_step_reads_nothing() -> None:
    """Of the device, whatever is given."""
    for scheduler in ("threshold", "wino", "slowfast", "fixed", "remdm"):
        sampler = toys.sampler(scheduler=scheduler, guide={"name": "regex", "pattern": "([a-j][0-9]?)*"})
        engine = sampler.engine(sampler.plugins)
        p, spec = sampler.plugins, sampler.denoiser.spec
        given_ = [[FREE, 2, FREE, FREE, 3, FREE, FREE, FREE]]
        canvas = layout.canvas([[5]], 8, [0], spec, p.blocks, sampler.noise, True, given=given_)
        state = engine.begin(canvas)
        for _ in range(3):
            with no_host_reads():
                engine.step(state)
            engine.poll(state)
